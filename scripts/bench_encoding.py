#!/usr/bin/env python3
"""Measures what the encodings make of K/V rows: ratio and bytes per second, per core.

    scripts/train_tiny.py --minutes 8 build/trained.npz          # needs JAX, see there
    scripts/bench_encoding.py [--trained build/trained.npz] [--out docs/measurements/encoding.md]

K/V comes from the reference engine: of a model with random weights (`tiering model make`) and, with
--trained, of the trained one, for text it has not seen. Rows are cut into blocks of 64 as an engine
does; a segment is one layer's K or V of a block. V of layer 0 depends on nothing but its token, and
with one token per byte tokens repeat: what stands for a real model are the layers above it. Ratios
of segments are before padding, `file` is whole block files, pages and headers included. Rates are
per second of processor time.
"""

from __future__ import annotations

import argparse
import shlex
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import zstandard

from ollama_tiering.bench.machine import begin, this_machine
from ollama_tiering.bench.tiers.kv_rows import (
    CONTEXT,
    Cache,
    made_up_passages,
    of_random_weights,
    of_trained,
    segments,
)
from ollama_tiering.store.block import planes, q8_0
from ollama_tiering.store.block.blockfile import encode_block, plan_block, read_meta
from ollama_tiering.store.block.checksum import crc32c
from ollama_tiering.store.block.encoding import ZstdPlanes
from ollama_tiering.store.block.key import DEFAULT_BLOCK_TOKENS as BLOCK_TOKENS
from ollama_tiering.store.block.key import tokens_to_bytes
from ollama_tiering.store.block.pb import block_store_pb2 as pb
from ollama_tiering.store.block.segments import SegmentShape
from ollama_tiering.store.tiers.memory import MemoryOpenBlock, MemoryTempBlock
from ollama_tiering.store.upkeep import transcode
from ollama_tiering.store.upkeep.transcode import Seconds

LEVELS = (1, 3, 6, 9)
REPEATS = 5
SEGMENT_BYTES = (32 << 10, 128 << 10, 512 << 10, 2 << 20)


def best_rate(work: Callable[[], Any], size_bytes: int) -> float:
    """GB/s of processor time, the fastest of several runs: other work on the machine only slows."""
    fastest = float("inf")
    for _ in range(REPEATS):
        start = time.thread_time()
        work()
        fastest = min(fastest, time.thread_time() - start)
    return size_bytes / fastest / 1e9


@dataclass(frozen=True)
class Measured:
    ratio: float
    encode: float  # GB/s of raw bytes, one core
    decode: float


def each(work: Callable[..., Any], *columns: Sequence[Any]) -> Callable[[], None]:
    """Calls it for every row and keeps no result, as the store does: memory is used again."""

    def run() -> None:
        for arguments in zip(*columns, strict=True):
            work(*arguments)

    return run


def split_and_zstd(parts: list[bytes], level: int) -> Measured:
    zstd_planes = ZstdPlanes(level)
    raw_bytes = sum(map(len, parts))
    frames = [zstd_planes.encode(part, "f16") for part in parts]
    lengths = [[len(frame) for frame in one] for one in frames]
    stored = [b"".join(one) for one in frames]
    for part, data, sizes in zip(parts, stored, lengths, strict=True):
        assert zstd_planes.decode(data, sizes, "f16", len(part)).tobytes() == part
    return Measured(
        raw_bytes / sum(map(len, stored)),
        best_rate(each(lambda part: zstd_planes.encode(part, "f16"), parts), raw_bytes),
        best_rate(
            each(
                lambda part, data, sizes: zstd_planes.decode(data, sizes, "f16", len(part)),
                parts,
                stored,
                lengths,
            ),
            raw_bytes,
        ),
    )


def q8_0_rounded(parts: list[bytes]) -> tuple[Measured, str]:
    """Encoding is rounding at commit and finding the codes when it is written down."""
    raw_bytes = sum(map(len, parts))
    rounded = [q8_0.round_rows(part) for part in parts]
    assert all(part is not None for part in rounded)
    codes = [q8_0.codes_of(part.data) for part in rounded if part is not None]
    stored = [part.data for part in codes if part is not None]
    assert len(stored) == len(parts)
    before = np.frombuffer(b"".join(parts), np.float16).astype(np.float32)
    after = np.concatenate([q8_0.rows_of(part).view(np.float16) for part in stored])
    error = np.sqrt(np.mean((after - before) ** 2) / np.mean(before**2))

    def encode(part: bytes) -> None:
        once = q8_0.round_rows(part)
        assert once is not None
        q8_0.codes_of(once.data)

    measured = Measured(
        raw_bytes / sum(map(len, stored)),
        best_rate(each(encode, parts), raw_bytes),
        best_rate(each(q8_0.rows_of, stored), raw_bytes),
    )
    return measured, f"error {100 * error:.2f} % rms"


def plain_zstd(parts: list[bytes], level: int) -> Measured:
    """Without the split, for comparison."""
    raw_bytes = sum(map(len, parts))
    pack, unpack = zstandard.ZstdCompressor(level=level), zstandard.ZstdDecompressor()
    stored = [pack.compress(part) for part in parts]
    return Measured(
        raw_bytes / sum(map(len, stored)),
        best_rate(each(pack.compress, parts), raw_bytes),
        best_rate(each(unpack.decompress, stored), raw_bytes),
    )


def file_ratio(caches: list[Cache]) -> tuple[float, Measured]:
    """(share of segments that were encoded, whole files through transcode in memory)."""
    zstd_planes = ZstdPlanes()
    raw_bytes = stored_bytes = encoded_segments = all_segments = 0
    encoding = decoding = 0.0
    for cache in caches:
        order = sorted(cache, key=lambda place: (place[0], place[1]))
        for start in range(0, CONTEXT, BLOCK_TOKENS):
            rows = [np.ascontiguousarray(cache[place][start : start + 64]) for place in order]
            kinds = {"k": pb.SEGMENT_KIND_K, "v": pb.SEGMENT_KIND_V}
            plan = plan_block(
                namespace=bytes(32),  # type: ignore[arg-type]
                parent=bytes(32),
                tokens=tokens_to_bytes(range(len(rows[0]))),
                first_position=start,
                shapes=[
                    SegmentShape(0, layer, kinds[kind], "f16", rows[0][0].nbytes)
                    for layer, kind in order
                ],
            )
            data = encode_block(plan, [part.data for part in rows])
            block = MemoryOpenBlock(data)
            meta = read_meta(block.read_at, len(data))
            began = time.thread_time()
            made = transcode.encode(meta, block, zstd_planes, Seconds())
            encoding += time.thread_time() - began
            raw_bytes += len(data)
            all_segments += len(order)
            if made is None:
                stored_bytes += len(data)
                continue
            temp = MemoryTempBlock(meta.namespace, meta.key, made.file_bytes)
            made.write_to(temp, Seconds())
            stored_bytes += made.file_bytes
            small = MemoryOpenBlock(bytes(temp.data))
            meta = read_meta(small.read_at, made.file_bytes)
            encoded_segments += sum(segment.encoded for segment in meta.segments)
            back = MemoryTempBlock(meta.namespace, meta.key, meta.raw_file_bytes)
            began = time.thread_time()
            transcode.decode(meta, small, back, zstd_planes, Seconds())
            decoding += time.thread_time() - began
            assert bytes(back.data) == data
    measured = Measured(
        raw_bytes / stored_bytes,
        raw_bytes / encoding / 1e9,
        raw_bytes / decoding / 1e9 if decoding else float("nan"),
    )
    return encoded_segments / all_segments, measured


def plane_rows() -> list[str]:
    rows = []
    for size in SEGMENT_BYTES:
        raw = np.random.default_rng(0).standard_normal(size // 2).astype(np.float16).tobytes()
        array = np.frombuffer(raw, np.uint8)
        split = planes.split(raw, "f16")
        out = np.empty(size, np.uint8)
        low, high = np.empty(size // 2, np.uint8), np.empty(size // 2, np.uint8)

        def strided_split(low: Any = low, high: Any = high, array: Any = array) -> None:
            low[:], high[:] = array[0::2], array[1::2]

        def strided_join(out: Any = out, split: Any = split) -> None:
            out[0::2], out[1::2] = split

        rates = (
            best_rate(lambda raw=raw: planes.split(raw, "f16"), size),  # type: ignore[misc]
            best_rate(lambda s=split, n=size: planes.join(s, "f16", n), size),  # type: ignore[misc]
            best_rate(strided_split, size),
            best_rate(strided_join, size),
            best_rate(lambda out=out, array=array: np.copyto(out, array), size),  # type: ignore[misc]
            best_rate(lambda raw=raw: crc32c(raw), size),  # type: ignore[misc]
        )
        rows.append(f"| {size >> 10} KiB | " + " | ".join(f"{r:.1f}" for r in rates) + " |")
    return rows


def model_rows(name: str, caches: list[Cache]) -> list[str]:
    rows = []
    for label, kinds in (("K", "k"), ("V", "v"), ("K and V", "kv")):
        parts = segments(caches, kinds, first_layer=1)
        rows.append(row(name, label + ", not layer 0", "split, zstd 1", split_and_zstd(parts, 1)))
    parts = segments(caches, "kv")
    for level in LEVELS:
        rows.append(row(name, "K and V", f"split, zstd {level}", split_and_zstd(parts, level)))
    rows.append(row(name, "K and V", "zstd 1 without the split", plain_zstd(parts, 1)))
    parts = segments(caches, "kv", first_layer=1)
    lossy, error = q8_0_rounded(parts)
    rows.append(row(name, "K and V, not layer 0", f"q8_0 (lossy, {error})", lossy))
    share, files = file_ratio(caches)
    rows.append(row(name, "K and V", f"file, level 1; {100 * share:.0f} % of segments", files))
    return rows


def row(name: str, kinds: str, encoding: str, m: Measured) -> str:
    return f"| {name} | {kinds} | {encoding} | {m.ratio:.3f} | {m.encode:.2f} | {m.decode:.2f} |"


def report(trained: Path | None) -> list[str]:
    began = begin()
    lines = [
        "",
        f"GB/s of raw bytes in processor time, best of {REPEATS} (files: one run).",
        "",
        "## Ratio",
        "",
        "| model | rows | encoding | ratio | encode GB/s | decode GB/s |",
        "| --- | --- | --- | --- | --- | --- |",
    ]
    notes = []
    texts = made_up_passages()
    if trained is not None:
        caches, facts = of_trained(trained)
        lines += model_rows("trained", caches)
        notes.append(facts)
    lines += model_rows("random weights", of_random_weights(texts))
    notes.append("Random weights: the same shape, weights of `tiering model make`.")
    notes.append(
        "Layer 0 is apart because its V depends on the token alone, and byte tokens repeat within "
        "a block: what stands for a model of many layers and tokens is the rest."
    )
    lines += ["", *(f"- {note}" for note in notes), "", "## Byte planes", ""]
    lines += [
        "GB/s of one core, processor time. `strided` is `out[0::2] = low`; the product widens "
        "and multiplies 16-bit elements instead.",
        "",
        "| segment | split | join | strided split | strided join | memcpy | CRC-32C |",
        "| --- | --- | --- | --- | --- | --- | --- |",
        *plane_rows(),
    ]
    command = shlex.join(["scripts/bench_encoding.py", *sys.argv[1:]])
    origin = this_machine(began).lines(f"zstandard {zstandard.__version__}")
    return ["# Encodings of K/V rows", "", *origin, f"- Command: `{command}`", *lines]


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--trained", type=Path)
    parser.add_argument("--out", type=Path)
    given = parser.parse_args()
    text = "\n".join(report(given.trained)) + "\n"
    print(text)
    if given.out:
        given.out.write_text(text, encoding="utf-8")


if __name__ == "__main__":
    main()
