#!/usr/bin/env python3
"""Measures reading blocks of a cold disk: page cache or direct, raw or encoded.

    scripts/bench_cold_restore.py [--blocks 48] [--out docs/measurements/cold-restore.md]

Blocks have the geometry of qwen3-0.6b (28 layers, 8 heads of 128, 64 rows: 7.0 MiB), rows are
normal noise in f16, which compresses about as K/V of random weights does. They lie below --dir, on
the disk to be measured, and are dropped from the page cache before every run.
"""

from __future__ import annotations

import argparse
import mmap
import os
import resource
import shlex
import shutil
import statistics
import sys
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np

from ollama_tiering.bench.machine import begin, this_machine
from ollama_tiering.store.block.blockfile import (
    buffer_reader,
    encode_block,
    plan_block,
    read_meta,
    verify_payload,
)
from ollama_tiering.store.block.encoding import Encoding
from ollama_tiering.store.block.key import BlockKey, prefix_chain, tokens_to_bytes
from ollama_tiering.store.block.pb import block_store_pb2 as pb
from ollama_tiering.store.block.segments import SegmentShape
from ollama_tiering.store.books.encodings import TierEncodings
from ollama_tiering.store.serving.session import BlockOffer
from ollama_tiering.store.tiered import TieredStore
from ollama_tiering.store.tiers.contract import Tier, TierKind
from ollama_tiering.store.tiers.directory import FsTier
from ollama_tiering.store.tools import samples
from ollama_tiering.system.pagecache import forget, read_past

LAYERS, HEADS, HEAD_DIM, ROWS = 28, 8, 128, 64
REPEATS = 3
READ_FLAGS = os.O_RDONLY | os.O_CLOEXEC
NS = samples.namespace(block_tokens=ROWS, layers=LAYERS, kv_heads=HEADS, head_dim=HEAD_DIM)
NAMESPACE = NS.digest()
OTHER_FILE_BYTES = 256 << 20


def blocks(count: int) -> list[tuple[BlockKey, bytes, bytes]]:
    """(key, parent, file) of one sequence."""
    tokens = tokens_to_bytes(range(count * ROWS))
    keys = prefix_chain(NAMESPACE, tokens, ROWS)
    shapes = [
        SegmentShape(0, layer, kind, "f16", HEADS * HEAD_DIM * 2)
        for layer in range(LAYERS)
        for kind in (pb.SEGMENT_KIND_K, pb.SEGMENT_KIND_V)
    ]
    rng = np.random.default_rng(0)
    made: list[tuple[BlockKey, bytes, bytes]] = []
    for index, key in enumerate(keys):
        parent: bytes = keys[index - 1] if index else NAMESPACE
        plan = plan_block(
            namespace=NAMESPACE,
            parent=parent,
            tokens=tokens[index * ROWS * 4 : (index + 1) * ROWS * 4],
            first_position=index * ROWS,
            shapes=shapes,
        )
        rows = rng.standard_normal((len(shapes), ROWS * HEADS * HEAD_DIM), np.float32)
        made.append((key, parent, encode_block(plan, [r.data for r in rows.astype(np.float16)])))
    return made


def cached_pages(paths: list[Path]) -> float:
    """Share of the files' pages that are in the page cache, by reading without waiting."""
    page, present, pages = bytearray(4096), 0, 0
    for path in paths:
        fd = os.open(path, READ_FLAGS)
        for offset in range(0, os.fstat(fd).st_size, 16 << 12):  # every 16th
            pages += 1
            try:
                present += os.preadv(fd, [page], offset, os.RWF_NOWAIT) > 0
            except BlockingIOError:
                continue
        os.close(fd)
    return present / pages


def drop(paths: list[Path]) -> None:
    for path in paths:
        fd = os.open(path, READ_FLAGS)
        forget(fd)
        os.close(fd)


def buffered(path: Path) -> mmap.mmap:
    """As before: through the page cache, and left there."""
    size = path.stat().st_size
    memory = mmap.mmap(-1, size)
    fd = os.open(path, READ_FLAGS)
    with memoryview(memory) as view:
        offset = 0
        while offset < size:
            offset += os.preadv(fd, [view[offset:]], offset)
    os.close(fd)
    return memory


def direct(path: Path) -> mmap.mmap:
    return read_past(str(path), path.stat().st_size, READ_FLAGS)


def read_rows(paths: list[Path], other: Path) -> list[str]:
    total = sum(path.stat().st_size for path in paths)
    rows = []
    for name, read in (("page cache", buffered), ("direct", direct)):
        for threads in (1, 2, 4):
            seconds, cpu = [], []
            for _ in range(REPEATS):
                drop(paths)
                buffered(other).close()
                before = cached_pages([other])
                used = resource.getrusage(resource.RUSAGE_SELF)
                start = time.perf_counter()
                with ThreadPoolExecutor(threads) as pool:
                    for memory in pool.map(read, paths):
                        memory.close()
                seconds.append(time.perf_counter() - start)
                now = resource.getrusage(resource.RUSAGE_SELF)
                cpu.append(now.ru_utime + now.ru_stime - used.ru_utime - used.ru_stime)
            left, after = cached_pages(paths), cached_pages([other])
            middle = statistics.median(seconds)
            rows.append(
                f"| {name} | {threads} | {middle:.3f} | {total / middle / 1e9:.2f} "
                f"| {statistics.median(cpu):.2f} | {100 * left:.0f} % "
                f"| {100 * before:.0f} % / {100 * after:.0f} % |"
            )
    return rows


class Store:
    """RAM tier on tmpfs over a local tier below `disk`."""

    def __init__(self, disk: Path, encoding: Encoding, budget_bytes: int) -> None:
        self.ram_dir = Path(tempfile.mkdtemp(dir="/dev/shm", prefix="tiering-bench-"))
        self.local_dir = disk / encoding.value
        self.encoding, self.budget_bytes = encoding, budget_bytes
        self.open()

    def open(self) -> None:
        tiers: list[tuple[Tier, int]] = [
            (FsTier(TierKind.RAM, self.ram_dir), self.budget_bytes),
            (FsTier(TierKind.LOCAL, self.local_dir), self.budget_bytes),
        ]
        encodings = TierEncodings({TierKind.LOCAL: self.encoding})
        index_path = self.local_dir.with_suffix(".sqlite")
        self.store = TieredStore(
            tiers, index_path=index_path, background=False, encodings=encodings
        )

    def reboot(self) -> None:
        self.store.close()
        shutil.rmtree(self.ram_dir)
        self.open()
        drop(self.files())

    def files(self) -> list[Path]:
        return sorted(self.local_dir.rglob("*.kvb"))

    def put(self, made: list[tuple[BlockKey, bytes, bytes]]) -> float:
        """Seconds to write them down, CPU included."""
        session = self.store.open_session(NAMESPACE, NS.fields(), ROWS)
        for key, parent, data in made:
            (answer,) = session.reserve([BlockOffer(key, parent, len(data))])
            assert answer.path is not None, answer
            answer.path.write_bytes(data)
            (result,) = session.commit([answer.reservation_id])
            assert result.stored, result
        self.store.close_session(session)
        start = time.perf_counter()
        self.store.run_pending()
        return time.perf_counter() - start

    def restore(self, keys: list[BlockKey], threads: int) -> tuple[float, float]:
        """(seconds that match expects, seconds until all blocks are checked in memory)."""
        tokens = tokens_to_bytes(range(len(keys) * ROWS))
        found = self.store.match(NAMESPACE, keys, tokens, ROWS)
        expected = sum(block.expected_seconds for block in found)
        start = time.perf_counter()
        leased = self.store.lease(NAMESPACE, keys)
        assert len(leased.blocks) == len(keys)

        def load(index: int) -> None:
            block = leased.blocks[index]
            assert block.path is not None
            if block.tier is TierKind.RAM:
                fd = os.open(block.path, READ_FLAGS)
                memory = mmap.mmap(fd, block.file_bytes, prot=mmap.PROT_READ)
                os.close(fd)
            else:
                memory = direct(Path(block.path))
            reader = buffer_reader(memory)
            verify_payload(read_meta(reader, block.file_bytes), reader)

        with ThreadPoolExecutor(threads) as pool:
            list(pool.map(load, range(len(keys))))
        seconds = time.perf_counter() - start
        self.store.release(leased.lease_id)
        return expected, seconds

    def close(self) -> None:
        self.store.close()
        shutil.rmtree(self.ram_dir)


def restore_rows(disk: Path, made: list[tuple[BlockKey, bytes, bytes]]) -> list[str]:
    raw_bytes = sum(len(data) for _, _, data in made)
    rows = []
    for encoding in (Encoding.NONE, Encoding.ZSTD):
        store = Store(disk, encoding, 2 * raw_bytes)
        writing = store.put(made)
        taken, ratios = [], []
        for _ in range(REPEATS):
            store.reboot()
            stored_bytes = sum(path.stat().st_size for path in store.files())
            # what one block showed of the disk, as the sidecar's own samples do
            drop(store.files())
            start = time.perf_counter()
            direct(store.files()[0]).close()
            level = store.store._state.levels[1]
            level.speed.add_read(store.files()[0].stat().st_size, time.perf_counter() - start)
            store.store._state.encodings.measure()
            drop(store.files())
            expected, seconds = store.restore([key for key, _, _ in made], threads=2)
            taken.append(seconds)
            ratios.append(expected / seconds)
        report = store.store.report()
        store.close()
        middle = statistics.median(taken)
        rows.append(
            f"| {encoding.value} | {stored_bytes / 1e6:.0f} MB | {raw_bytes / stored_bytes:.3f} "
            f"| {writing:.2f} | {middle:.3f} | {raw_bytes / middle / 1e9:.2f} "
            f"| {', '.join(f'{r:.2f}' for r in ratios)} "
            f"| {report.decode_bytes_per_second / 1e9:.2f} |"
        )
    # 1 / d > 1 / (ratio d) + 1 / decoding, solved for d
    even = report.decode_bytes_per_second * (1 - stored_bytes / raw_bytes)
    note = (
        f"With this ratio and speed of decoding, zstd restores sooner than raw from a tier that "
        f"reads less than {even / 1e6:.0f} MB/s; from a faster one it saves room, not time."
    )
    return [*rows, "", note]


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--blocks", type=int, default=48)
    parser.add_argument("--dir", type=Path, default=Path.cwd())
    parser.add_argument("--out", type=Path)
    given = parser.parse_args()
    began = begin()
    made = blocks(given.blocks)
    with tempfile.TemporaryDirectory(dir=given.dir, prefix=".bench-") as name:
        disk = Path(name)
        paths = []
        for key, _, data in made:
            paths.append(disk / key.hex())
            paths[-1].write_bytes(data)
        other = disk / "weights"
        other.write_bytes(os.urandom(1 << 20) * (OTHER_FILE_BYTES >> 20))
        os.sync()
        reading = read_rows(paths, other)
        for path in paths:
            path.unlink()
        restoring = restore_rows(disk, made)
    total = sum(len(data) for _, _, data in made)
    lines = [
        "# Restore from a cold disk",
        "",
        *this_machine(began).lines(),
        f"- Command: `{shlex.join(['scripts/bench_cold_restore.py', *sys.argv[1:]])}`",
        "",
        f"{len(made)} blocks, {total / 1e6:.0f} MB raw, dropped from the page cache before each of "
        f"{REPEATS} runs; medians.",
        "",
        "## Page cache or direct",
        "",
        f"Whole blocks into memory. `left` is the share of the blocks' pages in the page cache "
        f"afterwards; `other file` that of a file of {OTHER_FILE_BYTES >> 20} MiB that was read "
        "before, before and after. No memory pressure was made.",
        "",
        "| read | threads | seconds | GB/s | CPU s | left | other file |",
        "| --- | --- | --- | --- | --- | --- | --- |",
        *reading,
        "",
        "## Raw or zstd",
        "",
        "Write down: RAM tier to local tier, one thread, fsync and encoding included. Restore: "
        "lease (for zstd: read, decode, write to tmpfs), then read or map and check every block "
        "with 2 threads. Expected: what the gate was told beforehand, by what was measured of the "
        "disk and of decoding until then; per run.",
        "",
        "| encoding | on disk | ratio | write down s | restore s | raw GB/s "
        "| expected ÷ taken | decodes GB/s |",
        "| --- | --- | --- | --- | --- | --- | --- | --- |",
        *restoring,
    ]
    text = "\n".join(lines) + "\n"
    print(text)
    if given.out:
        given.out.write_text(text, encoding="utf-8")


if __name__ == "__main__":
    main()
