"""A state of recurrent layers is a window block of one row, large and in f32: nothing in the store
minds that.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from measure.store import samples
from ollama_tiering.config import MIB
from ollama_tiering.store.block.blockfile import buffer_reader, plan_block, read_meta
from ollama_tiering.store.block.encoding import MAX_DECODED_BYTES, Encoding, ZstdPlanes
from ollama_tiering.store.block.key import tokens_to_bytes, window_end_extra
from ollama_tiering.store.block.pb import block_store_pb2 as pb
from ollama_tiering.store.block.segments import SegmentShape
from ollama_tiering.store.block.window_fields import end_row
from ollama_tiering.store.books.encodings import TierEncodings
from ollama_tiering.store.serving.offers import BlockOffer, check_meta, check_offer
from ollama_tiering.store.tiers.authenticity import MAX_AUTHENTIC_BYTES
from ollama_tiering.store.tiers.contract import TierKind
from ollama_tiering.store.tiers.directory import FsTier
from ollama_tiering.store.tiers.memory import MemoryOpenBlock, MemoryTempBlock
from ollama_tiering.store.tools.admin import Administration
from ollama_tiering.store.upkeep import transcode
from ollama_tiering.store.upkeep.transcode import Seconds
from tests.unit.store.support import BLOCK_TOKENS, NAMESPACE, NS, Bench, keys_of

TOKENS = list(range(10))
ROW_BYTES = 40_000
LARGEST_ROW_BYTES = 8 * MIB


def opened(root: Path) -> Bench:
    tiers = [
        (FsTier(TierKind.RAM, root / "ram"), 64 * MIB),
        (FsTier(TierKind.LOCAL, root / "local"), 64 * MIB),
    ]
    encodings = TierEncodings({TierKind.LOCAL: Encoding.ZSTD})
    return Bench(tiers=tiers, encodings=encodings)  # type: ignore[arg-type]


def states(blocks: list[samples.SampleBlock]) -> list[samples.SampleBlock]:
    """Two inside the first block, one at its end, and one at the end of the next."""
    return [
        samples.state(NS, blocks[at], TOKENS[4 * at + row], 4 * at, row=row, row_bytes=ROW_BYTES)
        for at, row in ((0, 0), (0, 2), (0, 3), (1, 3))
    ]


def test_states_are_stored_found_after_a_restart_and_read_back(tmp_path: Path) -> None:
    bench = opened(tmp_path)
    blocks = bench.put(TOKENS)
    for token in range(50, 60):  # blocks that many conversations begin with
        bench.put([*TOKENS[:4], token])
    hung = states(blocks)
    assert all(result.stored for result in bench.try_put(hung))
    bench.store.run_pending()
    for state in hung:
        record = bench.state.tree.get(state.key)
        assert record is not None
        assert record.encoded[1] < record.file_bytes == len(state.data)
    bench.store.close()
    for file in (tmp_path / "ram").rglob("*.kvb"):  # a reboot
        file.unlink()
    bench = opened(tmp_path)
    found = bench.match([*TOKENS, 99])
    assert [block.rows for block in found] == [4, 4, 2]
    named = [{one.key for one in block.attached} for block in found]
    assert named == [keys_of(hung[:3]), keys_of(hung[3:]), set()]
    for one in found[0].attached:
        assert one.stored_bytes < one.raw_bytes == len(hung[0].data)
    for state in hung:
        (block,) = bench.store.lease(NAMESPACE, [state.key]).blocks
        assert block.path is not None
        assert Path(block.path).read_bytes() == state.data
    admin = Administration(bench.store, alone=True)
    assert [f for step in admin.verify(repair=False) for f in step.findings] == []
    bench.store.close()


def large(layers: int = 24) -> tuple[bytes, int]:
    """The head of a file of 192 MiB, and its size."""
    plan = plan_block(
        namespace=NAMESPACE,
        parent=bytes(32),
        tokens=tokens_to_bytes([7]),
        first_position=BLOCK_TOKENS,
        shapes=[
            SegmentShape(2, layer, pb.SEGMENT_KIND_K, "f32", LARGEST_ROW_BYTES)
            for layer in range(layers)
        ],
        extras=[window_end_extra(2, 1)],
        cells=[2],
        created_unix_seconds=1,
    )
    return plan.head([1] * layers), plan.file_bytes


def test_a_large_one_is_a_valid_block_and_none_of_the_limits_is_below_it() -> None:
    head, file_bytes = large()
    assert 192 * MIB < file_bytes < 200 * MIB
    meta = read_meta(buffer_reader(head), file_bytes)
    assert (meta.rows, meta.cells, end_row(meta.plain_rows)) == (1, (2,), 2)
    assert {segment.raw_bytes for segment in meta.segments} == {LARGEST_ROW_BYTES}
    offer = BlockOffer(meta.key, meta.parent, file_bytes, tail=True)
    check_offer(offer)
    check_meta(meta, offer, NAMESPACE, BLOCK_TOKENS)
    assert LARGEST_ROW_BYTES <= MAX_DECODED_BYTES
    assert file_bytes <= min(transcode.MAX_ENCODED_FILE_BYTES, MAX_AUTHENTIC_BYTES)


@pytest.mark.parametrize("planes", [None, ZstdPlanes()])
def test_rounding_to_q8_0_leaves_f32_alone(planes: ZstdPlanes | None) -> None:
    """In a namespace whose rows are rounded, too."""
    state = states(samples.sequence(NS, TOKENS))[0]
    block = MemoryOpenBlock(state.data)
    meta = read_meta(block.read_at, block.file_bytes)
    temp = MemoryTempBlock(meta.namespace, meta.key, len(state.data))
    temp.write_at(0, state.data)
    transcode.round_rows(meta, block, temp)
    assert bytes(temp.data) == state.data
    made = transcode.encode(meta, block, planes, Seconds(), rounded=True)
    assert (made is None) == (planes is None)  # nothing but zstd may encode it
    if made is not None:
        temp = MemoryTempBlock(meta.namespace, meta.key, made.file_bytes)
        made.write_to(temp, Seconds())
        encoded = MemoryOpenBlock(bytes(temp.data))
        meta = read_meta(encoded.read_at, encoded.file_bytes)
        assert {segment.encoding for segment in meta.segments} == {pb.ENCODING_ZSTD}
        raw = MemoryTempBlock(meta.namespace, meta.key, meta.raw_file_bytes)
        transcode.decode(meta, encoded, raw, ZstdPlanes(), Seconds())
        assert bytes(raw.data) == state.data
