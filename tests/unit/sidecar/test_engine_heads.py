"""What is remembered of files is bounded, and only a file that fits the engine is remembered."""

from __future__ import annotations

from pathlib import Path

import pytest

from ollama_tiering.sidecar.engine.heads import Head, HeadReader, Heads
from ollama_tiering.sidecar.engine.identity import Identity, identity_of
from ollama_tiering.store.block.blockfile import encode_block, plan_block
from ollama_tiering.store.block.key import BlockKey, tokens_to_bytes
from ollama_tiering.store.block.pb import block_store_pb2 as pb
from ollama_tiering.store.block.segments import SegmentShape
from ollama_tiering.store.books.report import LeasedBlock
from ollama_tiering.store.errors import CorruptBlock, UnsupportedFormat
from ollama_tiering.store.tiers.contract import TierKind
from tests.contract.fake_engine import hello

IDENTITY = identity_of(hello())
TOKENS = tokens_to_bytes(range(5))


def key(number: int) -> BlockKey:
    return BlockKey(bytes([number]) * 32)


def test_those_used_last_are_kept() -> None:
    heads = Heads(max_bytes=2100)  # five of these
    for number in range(7):
        heads.put(key(number), Head(4096, 64, 0, bytes(16)))
        assert heads.get_all([key(0)]) != [None]  # always the one used last
    assert [head is not None for head in heads.get_all([key(n) for n in range(7)])] == [
        *(True, False, False, True, True, True, True)
    ]
    heads.forget(key(0))
    heads.forget(key(0))
    assert heads.get_all([key(0)]) == [None]


def block(
    path: Path,
    *,
    identity: Identity = IDENTITY,
    shapes: tuple[SegmentShape, ...] | None = None,
    tokens: bytes = TOKENS,
) -> LeasedBlock:
    plan = plan_block(
        namespace=identity.namespace,
        parent=identity.namespace,
        tokens=tokens,
        first_position=0,
        shapes=identity.shapes if shapes is None else shapes,
    )
    data = encode_block(plan, [tokens[:1] * size for _, size in plan.spans])
    path.write_bytes(data)
    path.chmod(0o400)
    return LeasedBlock(plan.key, identity.namespace, TierKind.RAM, str(path), len(data))


def test_a_block_of_the_engine_is_known_by_its_offset_and_checksums(tmp_path: Path) -> None:
    head = HeadReader(IDENTITY).read(block(tmp_path / "b"))
    assert (head.payload_offset, head.rows, head.used, len(head.crcs)) == (4096, 5, 0, 16)


def test_the_second_block_of_an_engine_is_known_as_the_first_is(tmp_path: Path) -> None:
    """Its header is of a known layout, and not looked through: the checksums are its own."""
    reader, second = HeadReader(IDENTITY), block(tmp_path / "b", tokens=tokens_to_bytes([9] * 5))
    assert reader.read(block(tmp_path / "a")) != reader.read(second)
    assert reader.read(second) == HeadReader(IDENTITY).read(second)


def test_behind_a_known_layout_another_engines_block_is_refused(tmp_path: Path) -> None:
    reader, other = HeadReader(IDENTITY), identity_of(hello(fields={"rope": "b"}))
    one = block(tmp_path / "a")
    reader.read(one)
    for number, theirs in enumerate(
        [block(tmp_path / "b", identity=other), block(tmp_path / "c", tokens=TOKENS[:-1] + b"\1")]
    ):
        path = theirs.path
        with pytest.raises(CorruptBlock, match="another block"):
            reader.read(LeasedBlock(one.key, one.namespace, one.tier, path, one.file_bytes))
        assert reader.read(one), number


def test_a_block_of_other_segments_is_none_for_this_engine(tmp_path: Path) -> None:
    first, second, *rest = IDENTITY.shapes
    wider = SegmentShape(second.child, second.layer, second.kind, second.dtype, 32)
    for number, shapes in enumerate([(first, wider, *rest), (first, second), (first,)]):
        reader, one = HeadReader(IDENTITY), block(tmp_path / f"{number}", shapes=shapes)
        for _ in range(2):  # nor is its layout remembered as one that fits
            with pytest.raises(UnsupportedFormat):
                reader.read(one)


def test_a_file_that_holds_another_block_or_is_cut_is_damaged(tmp_path: Path) -> None:
    ours, other = block(tmp_path / "a"), identity_of(hello(fields={"rope": "b"}))
    theirs = block(tmp_path / "b", identity=other)
    swapped = LeasedBlock(ours.key, ours.namespace, ours.tier, theirs.path, theirs.file_bytes)
    wider = block(tmp_path / "c", identity=other, shapes=IDENTITY.shapes[:1])
    misplaced = LeasedBlock(ours.key, ours.namespace, ours.tier, wider.path, wider.file_bytes)
    longer = LeasedBlock(ours.key, ours.namespace, ours.tier, ours.path, ours.file_bytes + 4096)
    for one in (swapped, misplaced, longer):
        with pytest.raises(CorruptBlock):
            HeadReader(IDENTITY).read(one)


def test_a_file_that_others_may_write_or_a_link_is_not_read(tmp_path: Path) -> None:
    one = block(tmp_path / "a")
    assert one.path is not None
    (tmp_path / "link").symlink_to(one.path)
    linked = LeasedBlock(one.key, one.namespace, one.tier, str(tmp_path / "link"), one.file_bytes)
    with pytest.raises(OSError, match="symbolic"):
        HeadReader(IDENTITY).read(linked)
    Path(one.path).chmod(0o420)
    with pytest.raises(FileNotFoundError):
        HeadReader(IDENTITY).read(one)


def test_segments_of_a_state_are_its_parts(tmp_path: Path) -> None:
    shapes = (SegmentShape(1, 0, pb.SEGMENT_KIND_K, "u8", 100),)
    plan = plan_block(
        namespace=IDENTITY.namespace,
        parent=bytes(32),
        tokens=TOKENS[:4],
        first_position=64,
        shapes=shapes,
        cells=[0],
    )
    data = encode_block(plan, [bytes(100)])
    path = tmp_path / "s"
    path.write_bytes(data)
    path.chmod(0o400)
    leased = LeasedBlock(plan.key, IDENTITY.namespace, TierKind.RAM, str(path), len(data))
    assert HeadReader(IDENTITY).read(leased).used == 100
    reader = HeadReader(identity_of(hello(layers=2, fields={})))
    leased = _of_child(leased, plan.key, path)
    with pytest.raises(CorruptBlock, match="no state"):
        reader.read(leased)


def _of_child(leased: LeasedBlock, wanted: BlockKey, path: Path) -> LeasedBlock:
    """The same, as a state of another child would be."""
    plan = plan_block(
        namespace=IDENTITY.namespace,
        parent=bytes(32),
        tokens=TOKENS[:4],
        first_position=64,
        shapes=(SegmentShape(2, 0, pb.SEGMENT_KIND_K, "u8", 100),),
        cells=[0],
    )
    assert plan.key == wanted
    path.chmod(0o600)
    path.write_bytes(encode_block(plan, [bytes(100)]))
    path.chmod(0o400)
    return leased
