"""Blocks on their way into and out of an encoding."""

from __future__ import annotations

import contextlib
from collections.abc import Callable

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ollama_tiering.store.block.blockfile import (
    PREAMBLE_BYTES,
    buffer_reader,
    encode_block,
    pack_head,
    plan_block,
    read_meta,
    verify_payload,
)
from ollama_tiering.store.block.encoding import MAX_DECODED_BYTES
from ollama_tiering.store.block.key import tokens_to_bytes
from ollama_tiering.store.block.pb import block_store_pb2 as pb
from ollama_tiering.store.block.segments import SegmentShape
from ollama_tiering.store.errors import CorruptBlock, UnsupportedFormat
from tests.unit.store.encoded import ENCODED, NAMESPACE, RAW, block, decoded, encoded, reheaded

NOISE = bytes((i * i * 31 + i // 7 * 13) % 251 for i in range(9000 * 9))


def test_a_decoded_file_is_the_one_that_was_encoded() -> None:
    assert len(ENCODED) < 0.9 * len(RAW)
    assert decoded(ENCODED) == RAW


def test_an_encoded_file_is_a_valid_block_of_the_same_key() -> None:
    meta = read_meta(buffer_reader(ENCODED), len(ENCODED))
    raw = read_meta(buffer_reader(RAW), len(RAW))
    verify_payload(meta, buffer_reader(ENCODED))
    assert (meta.key, meta.tokens, meta.parent) == (raw.key, raw.tokens, raw.parent)
    assert meta.encoded
    assert not raw.encoded
    assert meta.raw_file_bytes == len(RAW) == raw.raw_file_bytes
    assert [s.raw_crc32c for s in meta.segments] == [s.crc32c for s in raw.segments]


@settings(max_examples=60)
@given(
    rows=st.integers(1, 9),
    row_bytes=st.lists(st.integers(1, 9000), min_size=1, max_size=4),
    fills=st.lists(st.one_of(st.none(), st.binary(min_size=1, max_size=5)), min_size=4, max_size=4),
    dtype=st.sampled_from(["f16", "f32", "q8_0"]),
    slack_pages=st.integers(0, 2),
)
def test_any_block_comes_back_byte_for_byte(
    rows: int, row_bytes: list[int], fills: list[bytes | None], dtype: str, slack_pages: int
) -> None:
    shapes = [
        SegmentShape(0, layer, pb.SEGMENT_KIND_K, dtype, width)
        for layer, width in enumerate(row_bytes)
    ]
    plan = plan_block(
        namespace=NAMESPACE,
        parent=NAMESPACE,
        tokens=tokens_to_bytes(range(rows)),
        first_position=0,
        shapes=shapes,
        created_unix_seconds=7,
    )
    # another writer may leave more room before the payload
    plan.payload_offset += slack_pages * 4096
    plan.file_bytes += slack_pages * 4096
    payload = [
        NOISE[: width * rows] if fill is None else (fill * (width * rows))[: width * rows]
        for width, fill in zip(row_bytes, fills, strict=False)
    ]
    data = encode_block(plan, payload)
    made = encoded(data)
    if made is not None:
        assert len(made) <= 0.95 * len(data)
        assert decoded(made) == data


def test_noise_stays_raw() -> None:
    assert encoded(block([1, 2, 3, 4], noise=True)) is None


def test_an_encoded_block_is_not_encoded_again() -> None:
    assert encoded(ENCODED) is None


def test_damage_is_found_before_it_is_encoded() -> None:
    data = bytearray(RAW)
    data[5000] ^= 1
    with pytest.raises(CorruptBlock, match="checksum"):
        encoded(bytes(data))


@settings(max_examples=300, deadline=None)
@given(st.integers(0, len(ENCODED) * 8 - 1))
def test_no_flipped_bit_of_an_encoded_file_is_ever_decoded(bit: int) -> None:
    data = bytearray(ENCODED)
    data[bit // 8] ^= 1 << bit % 8
    with contextlib.suppress(CorruptBlock, UnsupportedFormat):
        assert decoded(bytes(data)) == RAW  # a bit of the padding


@given(st.integers(0, len(ENCODED) - 1))
def test_a_cut_encoded_file_is_damaged(length: int) -> None:
    with pytest.raises(CorruptBlock):
        decoded(ENCODED[:length])


def _set(**values: int) -> Callable[[pb.BlockHeader], None]:
    def change(header: pb.BlockHeader) -> None:
        for name, value in values.items():
            setattr(header.segments[0], name, value)

    return change


def _planes(*lengths: int) -> Callable[[pb.BlockHeader], None]:
    def change(header: pb.BlockHeader) -> None:
        header.segments[0].plane_bytes[:] = lengths

    return change


def _payload_offset(offset: int) -> Callable[[pb.BlockHeader], None]:
    def change(header: pb.BlockHeader) -> None:
        header.raw_payload_offset = offset

    return change


HEADER = read_meta(buffer_reader(ENCODED), len(ENCODED))
FIRST = HEADER.segments[0]


@pytest.mark.parametrize(
    "change",
    [
        _set(row_bytes=MAX_DECODED_BYTES // 4 + 1),  # claims to decode to more than is allowed
        _set(row_bytes=(1 << 32) - 1),
        _set(row_bytes=1),  # decodes to less than is stored
        _set(row_bytes=FIRST.row_bytes + 2),
        _set(raw_crc32c=FIRST.raw_crc32c ^ 1),
        _set(crc32c=FIRST.crc32c ^ 1),
        _planes(),
        _planes(FIRST.stored_bytes),
        _planes(*FIRST.plane_bytes, 1),
        _planes(FIRST.plane_bytes[0] - 1, FIRST.plane_bytes[1] + 1),
        _payload_offset(0),
        _payload_offset(4097),
        _payload_offset(1 << 40),
    ],
)
def test_a_header_that_lies_is_damage(change: Callable[[pb.BlockHeader], None]) -> None:
    with pytest.raises(CorruptBlock):
        decoded(reheaded(ENCODED, change))


def test_an_encoded_file_that_is_no_smaller_is_damage() -> None:
    pages = len(RAW) // 4096

    def change(header: pb.BlockHeader) -> None:
        header.segments[1].offset = len(RAW)

    payload = ENCODED[HEADER.payload_offset :]
    grown = reheaded(ENCODED, change)[: HEADER.payload_offset] + payload
    second = HEADER.segments[1]
    end = HEADER.payload_offset + len(RAW) + second.stored_bytes
    data = grown.ljust(-(-end // 4096) * 4096, b"\0")
    assert len(data) // 4096 > pages
    with pytest.raises(CorruptBlock, match="not smaller"):
        read_meta(buffer_reader(data), len(data))


def test_a_header_that_has_no_room_in_the_decoded_file_is_damage() -> None:
    def change(header: pb.BlockHeader) -> None:
        header.extras.add(row=3, digest=bytes(5000))

    from ollama_tiering.store.block.key import BlockExtra, block_key

    header_bytes = int.from_bytes(ENCODED[12:16], "little")
    header = pb.BlockHeader.FromString(ENCODED[PREAMBLE_BYTES : PREAMBLE_BYTES + header_bytes])
    change(header)
    header.key = block_key(header.parent, header.tokens, [BlockExtra(3, bytes(5000))])
    payload = ENCODED[HEADER.payload_offset :]
    data = pack_head(header.SerializeToString(), 8192) + payload
    with pytest.raises(CorruptBlock, match="does not fit"):
        decoded(data)
