"""Reports of runners, as the tests make them up."""

from __future__ import annotations

from typing import Any

from ollama_tiering.store.block.pb import block_store_pb2 as pb
from tests.unit.sidecar.ollama_models import blob

NAMESPACE = bytes(31) + b"\x01"
OTHER = bytes(31) + b"\x02"


def report(requests: int = 1, *, restored: int = 0, **more: Any) -> pb.RunnerReport:
    """Of so many requests of 100 tokens in memory and 50 computed each, and what was restored."""
    memory, computed = 100 * requests, 50 * requests
    values: dict[str, Any] = {
        "pid": 7,
        "started_unix_seconds": 1000.5,
        "tiered": True,
        "namespace": NAMESPACE,
        "model": blob(1),
        "engine": "ollama-go/0.16.3+1",
        "requests": requests,
        "prompt_tokens": memory + computed + restored,
        "memory_tokens": memory,
        "recomputed_tokens": computed,
        "restored_tokens": restored,
    }
    return pb.RunnerReport(**values | more)
