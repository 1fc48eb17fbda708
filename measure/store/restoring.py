"""Restoring: from RAM compared with memcpy, from a cold disk compared with one sequential direct
read.
"""

from __future__ import annotations

import contextlib
import os
import resource
import statistics
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, Final, TypeVar

import numpy as np
from numpy.typing import NDArray

from measure.results import Ratio, Section
from measure.store.hardware import (
    drop,
    memcpy_seconds,
    sequential_read_seconds,
    sequential_write_seconds,
    touched,
)
from measure.store.rig import ROWS, OpenRamBlock, RandomBlocks, StoreRig
from ollama_tiering.bench.table import rate
from ollama_tiering.store import LeasedBlock, TierKind, buffer_reader, read_meta, verify_buffer
from ollama_tiering.system.pagecache import read_past

T = TypeVar("T")

REPEATS: Final = 5
READERS: Final = 4  # blocks read at a time at the least, as the runner does
_FLAGS: Final = os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC


def measure(
    disk: Path, block_bytes: list[int], total_bytes: int, say: Callable[[str], None]
) -> Section:
    threads = min(8, os.cpu_count() or 1)
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))  # as Go does at a program's start
    ram, cold = [], []
    for size in block_bytes:
        name = f"blocks of {size >> 20} MiB"
        say(f"restore, {name}")
        blocks = RandomBlocks.of(size, total_bytes)
        rig = StoreRig(disk, total_bytes)
        try:
            rig.put(blocks, list(blocks.files()))
            rig.store.run_pending()
            ram += _from_ram(rig, blocks, name, threads)
            cold.append(_from_disk(rig, blocks, name, max(READERS, threads)))
        finally:
            rig.close()
    notes = [
        f"{total_bytes >> 20} MiB for every size of block, {threads} threads, {READERS} at least "
        f"for a disk; medians of {REPEATS} runs; what it is measured against ran in between.",
        "Copy: rows are read from the open files of the RAM tier into memory that is there, as the "
        "Go engine reads them into its cells. With check: look-up, lease, opening, and every "
        "checksum, of what has just been read, besides.",
        "Cold disk: lease, direct reads and every checksum; no page of the files was in memory. "
        "Against one file of as many bytes, read from end to end by one thread in requests of "
        "8 MiB.",
    ]
    return Section("restore", "Restoring", "÷ memcpy or direct read", [*ram, *cold], notes)


def _from_ram(rig: StoreRig, blocks: RandomBlocks, name: str, threads: int) -> list[Ratio]:
    copies, wholes, plain = [], [], []
    target: NDArray[np.uint8] | None = None
    for check in (False, True) * REPEATS:
        start = time.perf_counter()
        leased = _lease(rig, blocks)
        with ThreadPoolExecutor(threads) as pool:
            files = _shared_out(pool, threads, _opened, leased)
            opened = time.perf_counter()
            total = sum(file.rows_bytes for file in files)
            if target is None:  # its pages are there before anything is timed
                target, source = touched(total), touched(total)
                start += time.perf_counter() - opened
                opened = time.perf_counter()
            _shared_out(pool, threads, _checked if check else _copied, files, _parts(target, files))
            done = time.perf_counter()
        if check:
            wholes.append(done - start)
        else:
            copies.append(done - opened)
            plain.append(memcpy_seconds(source, target))
        for file in files:
            file.close()
    bare = statistics.median(plain)
    against = f"memcpy by one thread, {rate(total / bare)}"
    found = []
    for what, seconds, bound in (("copy", copies, 0.80), ("with check", wholes, None)):
        taken = statistics.median(seconds)
        found.append(
            Ratio(f"RAM, {name}, {what}", rate(total / taken), against, bare / taken, bound)
        )
    return found


def _from_disk(rig: StoreRig, blocks: RandomBlocks, name: str, threads: int) -> Ratio:
    taken, plain = [], []
    other = rig.other_file
    total = sum(path.stat().st_size for path in rig.block_files(rig.local_dir))
    sequential_write_seconds(other, total)
    for _ in range(REPEATS):
        rig.reboot()
        drop(rig.block_files(rig.local_dir))
        start = time.perf_counter()
        leased = _lease(rig, blocks)
        with ThreadPoolExecutor(threads) as pool:
            _shared_out(pool, threads, _checked_read, leased)
        taken.append(time.perf_counter() - start)
        plain.append(sequential_read_seconds(other, total))
    seconds, bare = statistics.median(taken), statistics.median(plain)
    against = f"sequential direct read, {rate(total / bare)}"
    return Ratio(f"cold disk, {name}", rate(total / seconds), against, bare / seconds, 0.90)


def _shared_out(
    pool: ThreadPoolExecutor, threads: int, call: Callable[..., T], *of: Sequence[Any]
) -> list[T]:
    """As `pool.map`, but each thread works through a share of its own, as a client's readers do:
    handing over every block separately takes as long as copying a small one.
    """
    items = list(zip(*of, strict=True))
    shares = [items[first::threads] for first in range(threads)]
    done = list(pool.map(lambda share: [call(*item) for item in share], shares))
    return [done[index % threads][index // threads] for index in range(len(items))]


def _lease(rig: StoreRig, blocks: RandomBlocks) -> list[LeasedBlock]:
    rig.store.match(blocks.ns.digest(), blocks.keys, blocks.tokens, ROWS)
    leased = rig.store.lease(blocks.ns.digest(), blocks.keys)
    rig.store.release(leased.lease_id)  # nothing else runs here that could evict
    if len(leased.blocks) != len(blocks.keys):
        raise RuntimeError(f"{len(leased.blocks)} of {len(blocks.keys)} blocks are stored")
    return leased.blocks


def _opened(block: LeasedBlock) -> OpenRamBlock:
    if block.tier is not TierKind.RAM:
        raise RuntimeError(f"a block lies in the {block.tier.label} tier only")
    return OpenRamBlock(block)


def _copied(file: OpenRamBlock, rows: memoryview) -> None:
    file.read_into(rows, check=False)


def _checked(file: OpenRamBlock, rows: memoryview) -> None:
    file.read_into(rows, check=True)


def _checked_read(block: LeasedBlock) -> None:
    if block.tier is not TierKind.LOCAL:
        raise RuntimeError(f"a block lies in the {block.tier.label} tier")
    with contextlib.closing(read_past(str(block.path), block.file_bytes, _FLAGS)) as memory:
        verify_buffer(read_meta(buffer_reader(memory), len(memory)), memory)


def _parts(target: NDArray[np.uint8], files: Sequence[OpenRamBlock]) -> list[memoryview]:
    """Where the rows of each block go: one after the other."""
    memory, ends = target.data, np.cumsum([file.rows_bytes for file in files])
    return [memory[end - file.rows_bytes : end] for end, file in zip(ends, files, strict=True)]
