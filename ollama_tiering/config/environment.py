"""The names of all environment variables. No policy."""

from __future__ import annotations

from collections.abc import Iterable

ENV_CACHE = "OLLAMA_TIERING_CACHE"
ENV_CONFIG = "OLLAMA_TIERING_CONFIG"
ENV_SOURCE = "OLLAMA_TIERING_SOURCE"
ENV_ENABLE = "OLLAMA_KV_TIERING"
ENV_SOCKET = "OLLAMA_KV_TIER_SOCKET"
ENV_ENGINE_SOCKET = "OLLAMA_KV_TIER_ENGINE_SOCKET"
ENV_REFUSED_KINDS = "OLLAMA_KV_TIER_REFUSED_KINDS"  # set by a tree of links, for its llama-server
ENV_LLAMA_SERVER = "OLLAMA_KV_TIER_LLAMA_SERVER"  # program of `tiering llama-server`
ENV_RAM_DIR = "OLLAMA_KV_TIER_RAM"
ENV_RAM_GB = "OLLAMA_KV_TIER_RAM_GB"
ENV_LOCAL = "OLLAMA_KV_TIER_LOCAL"
ENV_LOCAL_GB = "OLLAMA_KV_TIER_LOCAL_GB"
ENV_REMOTE = "OLLAMA_KV_TIER_REMOTE"
ENV_REMOTE_GB = "OLLAMA_KV_TIER_REMOTE_GB"
ENV_LOCAL_ENCODING = "OLLAMA_KV_TIER_COMPRESS"
ENV_MIN_TOKENS = "OLLAMA_KV_TIER_MIN_TOKENS"
ENV_MODELS = "OLLAMA_MODELS"  # Ollama's own
ENV_LLAMA_CACHE = "LLAMA_ARG_CACHE_RAM"  # llama-server's own: its cache of prompts, MiB
ENV_SNAPSHOT = "OLLAMA_KV_TIER_SNAPSHOT"  # read by the patched server only
ENV_CPU_ATTENTION = "OLLAMA_CPU_ATTENTION"
ENV_GATE = "OLLAMA_KV_TIER_GATE"  # read by the patched server only
ENV_PAGED = "OLLAMA_PAGED_ATTN"  # read by the patched server, and by its library for GPUs

# What is read elsewhere: where it counts, or by the patched server and llama-server's library only.
_OTHERS = (
    "OLLAMA_TIERING_BINARY",
    "OLLAMA_TIERING_DEBUG",
    "OLLAMA_KV_TIER_ENCODING",
    "OLLAMA_KV_TIER_GUARD_ASKED",  # set by llama-server for itself
    "OLLAMA_KV_TIER_MEASURE",
    "OLLAMA_KV_TIER_PROGRESS_SECONDS",
    "OLLAMA_KV_TIER_SALT",
)
_OURS = ("OLLAMA_KV_TIER", "OLLAMA_TIERING")
_TESTS = "OLLAMA_TIERING_TEST_"
KNOWN = frozenset(
    value for name, value in list(globals().items()) if name.startswith("ENV_")
) | frozenset(_OTHERS)


def unknown(names: Iterable[str]) -> list[str]:
    """Those that begin as ours do and mean nothing to anybody: mistyped ones."""
    ours = {n for n in names if n.startswith(_OURS) and not n.startswith(_TESTS)}
    return sorted(ours - KNOWN)
