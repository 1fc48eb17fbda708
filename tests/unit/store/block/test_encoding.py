"""Byte planes and their zstd frames: any bytes come back, and no frame makes more of itself."""

from __future__ import annotations

import tracemalloc

import numpy as np
import pytest
import zstandard
from hypothesis import example, given
from hypothesis import strategies as st

from ollama_tiering.store.block import planes
from ollama_tiering.store.block.encoding import ZstdPlanes, pays
from ollama_tiering.store.errors import CorruptBlock

DTYPES = ["f16", "bf16", "f32", "q8_0", ""]
PLANES = ZstdPlanes()


@given(st.binary(max_size=3000), st.sampled_from(DTYPES))
@example(b"", "f16")
@example(b"\x01", "f16")
@example(b"\x01\x02\x03", "f32")
def test_any_bytes_come_back(raw: bytes, dtype: str) -> None:
    split = planes.split(raw, dtype)
    assert [plane.size for plane in split] == planes.plane_sizes(dtype, len(raw))
    assert planes.join(split, dtype, len(raw)).tobytes() == raw
    frames = PLANES.encode(raw, dtype)
    decoded = PLANES.decode(b"".join(frames), [len(f) for f in frames], dtype, len(raw))
    assert decoded.tobytes() == raw


def test_planes_are_the_bytes_of_each_place_lowest_first() -> None:
    assert [p.tolist() for p in planes.split(b"\x01\x11\x02\x12\x03\x13", "f16")] == [
        [1, 2, 3],
        [0x11, 0x12, 0x13],
    ]
    assert [p.tolist() for p in planes.split(bytes(range(9)), "f32")] == [
        [0, 4],
        [1, 5],
        [2, 6],
        [3, 7],
        [8],
    ]
    assert [p.tolist() for p in planes.split(b"abc", "q8_0")] == [[97, 98, 99]]


def test_a_segment_longer_than_a_part_comes_back() -> None:
    raw = np.random.default_rng(1).integers(0, 256, 500_001, np.uint8).tobytes()
    split = planes.split(raw, "f16")
    assert split[0].tobytes() == raw[: len(raw) // 2 * 2 : 2]
    assert split[1].tobytes() == raw[1::2]
    assert planes.join(split, "f16", len(raw)).tobytes() == raw


def test_f16_noise_gets_smaller_only_because_its_bytes_are_apart() -> None:
    raw = np.random.default_rng(0).standard_normal(65536).astype(np.float16).tobytes()
    apart = sum(map(len, PLANES.encode(raw, "f16")))
    assert apart < 0.88 * len(raw)
    assert apart < 0.95 * len(zstandard.ZstdCompressor(level=1).compress(raw))


RAW = np.random.default_rng(0).standard_normal(600).astype(np.float16).tobytes()
FRAMES = PLANES.encode(RAW, "f16")
SIZES = [len(frame) for frame in FRAMES]
STORED = b"".join(FRAMES)


@given(st.integers(0, len(STORED) - 1), st.integers(0, 7))
def test_a_flipped_bit_is_damage_or_other_bytes_of_the_same_length(at: int, bit: int) -> None:
    """The checksums around it tell which; here it may only not crash or grow."""
    damaged = bytearray(STORED)
    damaged[at] ^= 1 << bit
    try:
        decoded = PLANES.decode(damaged, SIZES, "f16", len(RAW))
    except CorruptBlock:
        return
    assert decoded.size == len(RAW)


@given(st.binary(max_size=200), st.integers(0, 64))
def test_garbage_is_damage(garbage: bytes, raw_bytes: int) -> None:
    if raw_bytes == 0 and not garbage:
        return
    with pytest.raises(CorruptBlock):
        PLANES.decode(garbage, [len(garbage)], "q8_0", raw_bytes)


@pytest.mark.parametrize("cut", [1, 10, len(FRAMES[1]) - 1])
def test_a_truncated_frame_is_damage(cut: int) -> None:
    with pytest.raises(CorruptBlock):
        PLANES.decode(STORED[:-cut], [SIZES[0], SIZES[1] - cut], "f16", len(RAW))


@pytest.mark.parametrize(
    "sizes", [[len(STORED)], [*SIZES, 0], [SIZES[0] + 1, SIZES[1]], [SIZES[1], SIZES[0]], []]
)
def test_planes_that_do_not_add_up_are_damage(sizes: list[int]) -> None:
    with pytest.raises(CorruptBlock):
        PLANES.decode(STORED, sizes, "f16", len(RAW))


@pytest.mark.parametrize("says_its_size", [True, False])
def test_a_bomb_allocates_no_more_than_its_segment(says_its_size: bool) -> None:
    compressor = zstandard.ZstdCompressor(level=1, write_content_size=says_its_size)
    frame = compressor.compress(bytes(256 << 20))
    assert len(frame) < 1 << 20
    tracemalloc.start()
    with pytest.raises(CorruptBlock):
        PLANES.decode(frame, [len(frame)], "q8_0", 4096)
    _, peak_bytes = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert peak_bytes < 1 << 20


def test_a_frame_that_lies_about_its_size_is_damage() -> None:
    """A header that says less, or more, than the frame's blocks hold."""
    frame = bytearray(zstandard.ZstdCompressor(level=1).compress(b"a" * 100))
    assert frame[4] == 0x20  # single segment, one byte of content size, which follows
    for lie in (99, 101):
        frame[5] = lie
        with pytest.raises(CorruptBlock):
            PLANES.decode(bytes(frame), [len(frame)], "q8_0", lie)


def test_five_percent_is_what_pays() -> None:
    assert pays(95, 100)
    assert not pays(96, 100)
