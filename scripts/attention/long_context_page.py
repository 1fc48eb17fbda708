"""The tables of docs/attention/long-context.md. Imported by gen_docs.py; the figures are those of
ollama_tiering/kernels/known_models.py and of bus_model.py beside this file.
"""

from __future__ import annotations

from pathlib import Path

from ollama_tiering.config import GIB
from ollama_tiering.kernels.known_models import GO_ENGINE, MODELS, KnownModel
from ollama_tiering.kernels.shape import Dtype
from scripts.attention import bus_model

ROOT = Path(__file__).resolve().parents[2]
PAGE = ROOT / "docs/attention/long-context.md"
CONTEXTS = (32768, 131072)
COLD_GIB = (0.5, 1, 2, 4, 8, 16, 32)
PROMPTS = (8192, 32768, 131072)
KINDS = (Dtype.F16, Dtype.Q8_0)


def parts() -> tuple[str, str, str]:
    """In the order in which the page has them."""
    return models_table(), decode_table(), prefill_table()


def models_table() -> str:
    sizes = " | ".join(f"{n // 1024}K: f16 | q8_0" for n in CONTEXTS)
    lines = [
        f"| model | engine | a token, KiB: f16 | q8_0 | K/V of a conversation, GiB: {sizes} |",
        "|---|---|---|---|" + "---|---|" * len(CONTEXTS),
    ]
    for model in MODELS:
        token = " | ".join(f"{model.bytes_per_token(kind) / 1024:.1f}" for kind in KINDS)
        whole = " | ".join(
            f"{model.kv_bytes(tokens, kind) / GIB:.1f}" for tokens in CONTEXTS for kind in KINDS
        )
        lines.append(f"| {model.name} | {engine_of(model)} | {token} | {whole} |")
    return "\n".join(lines) + "\n"


def engine_of(model: KnownModel) -> str:
    return "Go" if model.arch in GO_ENGINE else "llama.cpp"


def decode_table() -> str:
    lines = [
        "| bus | usable, GB/s | tokens/s at most, K/V in host memory and in use, GiB: "
        + " | ".join(f"{size:g}" for size in COLD_GIB)
        + " |",
        "|---|---|" + "---|" * len(COLD_GIB),
    ]
    for bus in bus_model.BUSES:
        rates = [bus_model.decode_tokens_per_second(size * GIB, bus) for size in COLD_GIB]
        lines.append(f"| {bus.name} | {_usable(bus)} | {' | '.join(map(_figure, rates))} |")
    return "\n".join(lines) + "\n"


def prefill_table() -> str:
    names = [f"{model.name}, {n // 1024}K" for model in _examples() for n in PROMPTS]
    lines = [
        f"| bus | usable, GB/s | seconds of the bus, all K/V in host memory: {' | '.join(names)} |",
        "|---|---|" + "---|" * len(names),
    ]
    for bus in bus_model.BUSES:
        seconds = [
            bus_model.prefill_seconds(n, model.bytes_per_token(Dtype.F16), bus)
            for model in _examples()
            for n in PROMPTS
        ]
        lines.append(f"| {bus.name} | {_usable(bus)} | {' | '.join(map(_figure, seconds))} |")
    return "\n".join(lines) + "\n"


def _examples() -> list[KnownModel]:
    return [one for one in MODELS if one.name in ("qwen3:14b", "gpt-oss:20b")]


def _usable(bus: bus_model.Bus) -> str:
    return f"{bus.usable_bytes_per_second / 1e9:.1f}"


def _figure(value: float) -> str:
    """Two digits that mean something."""
    return f"{value:.0f}" if value >= 10 else f"{value:.1f}"
