"""Block files beyond the golden vectors: round trips, and no flipped bit goes unseen."""

from __future__ import annotations

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from measure.store import samples
from ollama_tiering.store.block.blockfile import (
    MAX_HEADER_BYTES,
    buffer_reader,
    declared_file_bytes,
    encode_block,
    pack_head,
    plan_block,
    read_meta,
    verify_payload,
)
from ollama_tiering.store.block.checksum import crc32c
from ollama_tiering.store.block.key import BlockExtra, BlockKey, block_key, tokens_to_bytes
from ollama_tiering.store.block.pb import block_store_pb2 as pb
from ollama_tiering.store.block.segments import MAX_SEGMENTS, SegmentShape, align
from ollama_tiering.store.errors import CorruptBlock, UnsupportedFormat
from tests.vectors import building

NS = samples.namespace()
K, V = pb.SEGMENT_KIND_K, pb.SEGMENT_KIND_V
SAMPLE = samples.sequence(NS, [1, 2, 3])[0].data
SHAPES = [SegmentShape(0, 0, K, "f16", 16), SegmentShape(0, 0, V, "f16", 8)]


def check(data: bytes) -> None:
    verify_payload(read_meta(buffer_reader(data), len(data)), buffer_reader(data))


@given(
    tokens=st.lists(st.integers(-(2**31), 2**31 - 1), min_size=1, max_size=70),
    row_bytes=st.lists(st.integers(1, 300), min_size=1, max_size=5),
    with_extra=st.booleans(),
    fill=st.integers(0, 255),
)
def test_what_is_written_is_read(
    tokens: list[int], row_bytes: list[int], with_extra: bool, fill: int
) -> None:
    extras = [BlockExtra(len(tokens) - 1, bytes([7]) * 32)] if with_extra else []
    shapes = [SegmentShape(0, layer, K, "f16", width) for layer, width in enumerate(row_bytes)]
    data = tokens_to_bytes(tokens)
    plan = plan_block(
        namespace=NS.digest(),
        parent=NS.digest(),
        tokens=data,
        first_position=0,
        shapes=shapes,
        extras=extras,
    )
    payload = [bytes([fill]) * (width * len(tokens)) for width in row_bytes]
    file = encode_block(plan, payload)
    assert len(file) == plan.file_bytes
    assert len(file) % 4096 == 0
    meta = read_meta(buffer_reader(file), len(file))
    verify_payload(meta, buffer_reader(file))
    assert meta.key == block_key(NS.digest(), data, extras)
    assert (meta.tokens, meta.rows) == (data, len(tokens))
    assert list(meta.extras) == extras
    assert meta.plain_rows == (len(tokens) - 1 if with_extra else len(tokens))
    for segment, part in zip(meta.segments, payload, strict=True):
        assert segment.file_offset % 4096 == 0
        assert file[segment.file_offset :][: segment.stored_bytes] == part


def test_a_checksum_of_zero_still_fits_the_plan() -> None:
    plan = plan_block(
        namespace=NS.digest(),
        parent=NS.digest(),
        tokens=tokens_to_bytes([1]),
        first_position=0,
        shapes=SHAPES,
    )
    head = plan.head([0, 0])  # a fixed32 of 0 is not serialized: the header is shorter
    assert len(head) == plan.payload_offset
    file = head + bytes(plan.file_bytes - len(head))
    assert read_meta(buffer_reader(file), len(file)).segments[0].crc32c == 0


@settings(max_examples=300)
@given(st.integers(0, len(SAMPLE) * 8 - 1))
@example(0)
@example(28 * 8)
def test_no_flipped_bit_goes_unseen_where_it_matters(bit: int) -> None:
    data = bytearray(SAMPLE)
    data[bit // 8] ^= 1 << bit % 8
    meta = read_meta(buffer_reader(SAMPLE), len(SAMPLE))
    header_bytes = int.from_bytes(SAMPLE[12:16], "little")
    covered = [(0, 32 + header_bytes)]
    covered += [(s.file_offset, s.file_offset + s.stored_bytes) for s in meta.segments]
    if any(start <= bit // 8 < end for start, end in covered):
        with pytest.raises((CorruptBlock, UnsupportedFormat)):
            check(bytes(data))
    else:  # padding
        check(bytes(data))


@given(st.integers(0, len(SAMPLE) - 1))
def test_a_cut_file_is_damaged(length: int) -> None:
    with pytest.raises(CorruptBlock):
        check(SAMPLE[:length])


@given(st.binary(max_size=200))
def test_garbage_is_damage_and_never_another_error(garbage: bytes) -> None:
    for data in (
        garbage,
        SAMPLE[:32] + garbage,
        SAMPLE[:12] + garbage + SAMPLE[12 + len(garbage) :],
    ):
        try:
            check(data)
        except (CorruptBlock, UnsupportedFormat):
            continue
        assert data == SAMPLE


def test_a_header_with_more_segments_than_allowed_is_damage() -> None:
    shapes = [SegmentShape(0, layer, K, "f16", 1) for layer in range(MAX_SEGMENTS)]
    most = building.block([1], shapes)
    check(most)

    def one_more(header: pb.BlockHeader) -> None:
        last = header.segments[-1]
        header.segments.add().CopyFrom(last)
        building.segment(-1, child=1, offset=last.offset + 4096)(header)

    _, _, payload = building.parts(most)
    more = building.reheaded(most, one_more, payload=payload + payload[-4096:])
    with pytest.raises(CorruptBlock, match="4097 segments"):
        check(more)


@pytest.mark.parametrize("header_bytes", [MAX_HEADER_BYTES, MAX_HEADER_BYTES + 1])
def test_a_header_longer_than_allowed_is_damage(header_bytes: int) -> None:
    header, _, payload = building.parts(SAMPLE)
    serialized = header.SerializeToString()
    unknown = b"\xc2\x3e"  # field 1000, bytes
    fill = header_bytes - len(serialized) - len(unknown) - 3
    length = bytes([fill & 127 | 128, fill >> 7 & 127 | 128, fill >> 14])
    serialized += unknown + length + bytes(fill)
    assert len(serialized) == header_bytes
    file = pack_head(serialized, align(32 + header_bytes)) + payload
    if header_bytes == MAX_HEADER_BYTES:
        check(file)
    else:
        with pytest.raises(CorruptBlock, match="longer than allowed"):
            check(file)


def test_a_declared_size_is_known_once_the_header_is_there() -> None:
    header_bytes = int.from_bytes(SAMPLE[12:16], "little")
    assert declared_file_bytes(SAMPLE[:31]) is None
    assert declared_file_bytes(SAMPLE[: 31 + header_bytes]) is None
    assert declared_file_bytes(SAMPLE[: 32 + header_bytes]) == len(SAMPLE)
    assert declared_file_bytes(SAMPLE) == len(SAMPLE)


def test_a_plan_refuses_what_a_reader_would() -> None:
    base = {"namespace": NS.digest(), "parent": NS.digest(), "first_position": 0}
    tokens = tokens_to_bytes([1])
    for wrong in (
        {"tokens": b"", "shapes": SHAPES},
        {"tokens": bytes(4 * 4097), "shapes": SHAPES},
        {"tokens": b"abc", "shapes": SHAPES},
        {"tokens": tokens, "shapes": SHAPES[::-1]},
        {"tokens": tokens, "shapes": [SHAPES[0], SHAPES[0]]},
        {"tokens": tokens, "shapes": []},
    ):
        with pytest.raises(ValueError, match=r"rows|segments"):
            plan_block(**base, **wrong)  # type: ignore[arg-type]
    plan = plan_block(**base, tokens=tokens, shapes=SHAPES)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="its shape says 16"):
        encode_block(plan, [bytes(15), bytes(8)])


@pytest.mark.parametrize("make", [bytes, bytearray, memoryview])
def test_crc32c_equals_the_known_value_for_any_buffer(make: type) -> None:
    assert crc32c(make(b"123456789")) == 0xE3069283
    assert crc32c(make(b"6789"), crc32c(b"12345")) == 0xE3069283
    assert crc32c(make(b"")) == 0
    long = bytes(range(256)) * 9000
    assert crc32c(make(long)) == crc32c(long[1 << 20 :], crc32c(long[: 1 << 20]))


def test_sample_keys_are_block_keys() -> None:
    first, second = samples.sequence(NS, [1, 2, 3, 4, 5])
    assert first.parent == NS.digest()
    assert second.parent == first.key
    assert second.key == block_key(BlockKey(first.key), tokens_to_bytes([5]))
