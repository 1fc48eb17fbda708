"""Storing: from the first reservation until everything is on the disk, against one direct write."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Final

from ollama_tiering.bench.table import rate
from ollama_tiering.bench.tiers.hardware import sequential_write_seconds
from ollama_tiering.bench.tiers.results import Ratio, Section
from ollama_tiering.bench.tiers.rig import Blocks, Rig
from ollama_tiering.store.session import Claim

REPEATS: Final = 3
_POLL_SECONDS: Final = 0.001
_MOST_SECONDS: Final = 600.0


def measure(
    disk: Path, block_bytes: list[int], total_bytes: int, say: Callable[[str], None]
) -> Section:
    ratios = []
    for size in block_bytes:
        name = f"blocks of {size >> 20} MiB"
        say(f"put, {name}")
        blocks = Blocks.of(size, total_bytes)
        files = list(blocks.files())
        total = sum(len(data) for _, data in files)
        accepted, taken, plain = [], [], []
        for _ in range(REPEATS):
            client, whole, bare = _once(disk, blocks, files, total)
            accepted.append(client)
            taken.append(whole)
            plain.append(bare)
        seconds, bare = statistics.median(taken), statistics.median(plain)
        against = f"sequential direct write, {rate(total / bare)}"
        measured = f"{rate(total / seconds)} (client done at {rate(total / _median(accepted))})"
        ratios.append(Ratio(f"put, {name}", measured, against, bare / seconds, 0.85))
    notes = [
        f"{total_bytes >> 20} MiB for every size of block; medians of {REPEATS} runs, what it is "
        "measured against in between.",
        "From the client's first reservation until every block is on the disk, synced and under "
        "its name. The client's own share, the writing into the RAM tier, is in it.",
        "Against one file of as many bytes, direct, in requests of 8 MiB, synced once at its end.",
    ]
    return Section("put", "Storing", "÷ direct write", ratios, notes)


def _once(
    disk: Path, blocks: Blocks, files: Sequence[tuple[Claim, bytes]], total: int
) -> tuple[float, float, float]:
    """Seconds until the client is done, until all is on the disk, and of the plain write."""
    rig = Rig(disk, total, background=True)
    try:
        start = time.perf_counter()
        rig.put(blocks, files)
        client = time.perf_counter() - start
        level = rig.store.state.levels[-1]
        while len(level.lru) < len(files):
            if time.perf_counter() - start > _MOST_SECONDS:
                raise RuntimeError(f"{len(level.lru)} of {len(files)} blocks were written down")
            time.sleep(_POLL_SECONDS)
        whole = time.perf_counter() - start
        other = rig.other_file
        return client, whole, sequential_write_seconds(other, total)
    finally:
        rig.close()


def _median(values: Sequence[float]) -> float:
    return statistics.median(values)
