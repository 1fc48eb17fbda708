"""Describes where the K/V of a loaded model lie: what a runner reports, in words and as fields."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from ollama_tiering.config import count, format_size

if TYPE_CHECKING:
    from ollama_tiering.store import block_store_pb2 as pb


def words(memory: pb.CacheMemory) -> str:
    """Empty for a model without K/V, and for a runner that does not say."""
    pinned = "paged, in pinned memory of the system"
    if memory.mirrored_bytes:
        pinned += f" ({format_size(memory.mirrored_bytes)} of it in GPU memory as well)"
    places = (
        (memory.device_layers, memory.device_bytes, "in GPU memory"),
        (memory.pinned_layers, memory.pinned_bytes, pinned),
        (memory.host_layers, memory.host_bytes, "in the CPU's memory, which computes them"),
    )
    said = [
        f"{_layers(layers)} ({format_size(size)}) {place}"
        for layers, size, place in places
        if layers
    ]
    if memory.pinned_layers and memory.in_turn:
        said.append("none is copied ahead of its turn, for want of GPU memory")
    return ", ".join(said)


def document(runner: pb.RunnerReport) -> dict[str, Any] | None:
    """Returns None for a runner that does not say."""
    if not runner.HasField("cache_memory"):
        return None
    memory = runner.cache_memory
    return {
        "device_layers": memory.device_layers,
        "device_bytes": memory.device_bytes,
        "pinned_layers": memory.pinned_layers,
        "pinned_bytes": memory.pinned_bytes,
        "mirrored_bytes": memory.mirrored_bytes,
        "host_layers": memory.host_layers,
        "host_bytes": memory.host_bytes,
        "paging_asked": memory.paging_asked,
        "in_turn": memory.in_turn,
    }


def _layers(number: int) -> str:
    return count(number, "layer")
