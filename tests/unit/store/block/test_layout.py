"""A header of a known layout needs no further look, and nothing else passes for one."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from ollama_tiering.store.block.blockfile import (
    buffer_reader,
    check_header,
    plan_block,
    read_header,
)
from ollama_tiering.store.block.key import BlockExtra, block_key, tokens_to_bytes
from ollama_tiering.store.block.layout import KnownLayouts
from ollama_tiering.store.block.pb import block_store_pb2 as pb
from ollama_tiering.store.block.segments import SegmentShape
from tests.vectors import malformed

SHAPES = [
    SegmentShape(0, layer, kind, "f16", 32)
    for layer in range(2)
    for kind in (pb.SEGMENT_KIND_K, pb.SEGMENT_KIND_V)
]
Place = tuple[int, int]  # payload offset, size of the file


def header_of(
    tokens: range, *, parent: bytes = bytes(32), extras: tuple[BlockExtra, ...] = ()
) -> tuple[pb.BlockHeader, Place]:
    plan = plan_block(
        namespace=bytes(32),
        parent=parent,
        tokens=tokens_to_bytes(tokens),
        first_position=tokens.start,
        shapes=SHAPES,
        extras=extras,
    )
    head = plan.head([tokens.start + number for number in range(len(SHAPES))])
    header, offset = read_header(buffer_reader(head), plan.file_bytes)
    return header, (offset, plan.file_bytes)


def known() -> KnownLayouts:
    layouts = KnownLayouts()
    header, place = header_of(range(10, 14))
    assert not layouts.passes(header, *place)
    layouts.learn(header, *place)
    return layouts


def test_another_block_of_the_layout_passes() -> None:
    header, place = header_of(range(20, 24), parent=bytes([1]) * 32)
    assert known().passes(header, *place)
    assert [s.crc32c for s in header.segments] == [20, 21, 22, 23]  # it stays as it was


def test_another_number_of_rows_is_another_layout() -> None:
    header, place = header_of(range(20, 25))
    assert not known().passes(header, *place)


def test_a_block_with_an_image_is_looked_through() -> None:
    header, place = header_of(range(20, 24), extras=(BlockExtra(0, bytes(32)),))
    layouts = known()
    layouts.learn(header, *place)
    assert not layouts.passes(header, *place)


def test_blocks_with_images_take_no_room_from_others() -> None:
    layouts = KnownLayouts()
    for number in range(100):
        image = BlockExtra(0, bytes([number]) * 32)
        header, place = header_of(range(20, 24), extras=(image,))
        layouts.learn(header, *place)
    header, place = header_of(range(20, 24))
    layouts.learn(header, *place)
    assert layouts.passes(header, *place)


def _rekeyed(header: pb.BlockHeader) -> None:
    header.key = block_key(header.parent, header.tokens)


def _cut_parent(header: pb.BlockHeader) -> None:
    header.parent = header.parent[1:]
    _rekeyed(header)


def _cut_namespace(header: pb.BlockHeader) -> None:
    header.namespace = header.namespace[1:]


def _other_tokens(header: pb.BlockHeader) -> None:
    header.tokens = header.tokens[4:] + header.tokens[:4]


def _moved(header: pb.BlockHeader) -> None:
    header.segments[1].offset += 4096


def _longer_token(header: pb.BlockHeader) -> None:
    header.tokens += b"\0"
    _rekeyed(header)


def _of_window(header: pb.BlockHeader) -> None:
    header.cells.append(3)


@pytest.mark.parametrize(
    "change",
    [_cut_parent, _cut_namespace, _other_tokens, _moved, _longer_token, _of_window],
)
def test_what_the_whole_check_refuses_is_of_no_known_layout(
    change: Callable[[pb.BlockHeader], None],
) -> None:
    header, place = header_of(range(10, 14))
    change(header)
    assert not known().passes(header, *place)


def test_another_place_or_size_of_the_file_is_another_layout() -> None:
    header, (offset, size) = header_of(range(10, 14))
    for place in ((offset + 4096, size), (offset, size + 4096)):
        assert not known().passes(header, *place)


def test_no_malformed_file_is_of_a_known_layout() -> None:
    """They differ from this block in one thing each."""
    data = malformed.SMALL
    layouts, (header, offset) = KnownLayouts(), read_header(buffer_reader(data), len(data))
    check_header(header, offset, len(data))
    layouts.learn(header, offset, len(data))
    seen = 0
    for name, (expect, _, content) in malformed.files().items():
        try:
            header, offset = read_header(buffer_reader(content), len(content))
        except Exception:  # refused sooner
            continue
        passes = layouts.passes(header, offset, len(content))
        assert passes == (expect == "corrupt-payload"), name
        seen += 1
    assert seen > 20


def test_what_is_remembered_is_bounded() -> None:
    layouts = KnownLayouts()
    header, (offset, size) = header_of(range(10, 14))
    for number in range(300):
        layouts.learn(header, offset, size + number)
    assert layouts.passes(header, offset, size)
    assert not layouts.passes(header, offset, size + 299)
