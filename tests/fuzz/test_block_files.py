"""Whatever a block file holds: an error of two kinds, or a block whose checksums are right."""

from __future__ import annotations

import pytest

from measure.store import samples
from ollama_tiering.client.restored import Block, BlockRef, Match, checked
from ollama_tiering.store.block.blockfile import (
    MAX_ROWS,
    BlockMeta,
    buffer_reader,
    check_header,
    declared_file_bytes,
    read_header,
    read_meta,
    verify_payload,
)
from ollama_tiering.store.block.encoding import MAX_DECODED_BYTES
from ollama_tiering.store.block.key import Namespace, block_key
from ollama_tiering.store.block.layout import KnownLayouts
from ollama_tiering.store.errors import CorruptBlock, UnsupportedFormat
from ollama_tiering.store.tiers.memory import MemoryOpenBlock, MemoryTempBlock
from ollama_tiering.store.upkeep import transcode
from ollama_tiering.store.upkeep.transcode import Seconds
from tests.fuzz.campaign import Campaign, at_most, count, time_limit
from tests.fuzz.mutations import NAMESPACE, NS, PLANES, SAMPLES, Mutant, mutate

INPUTS = count("block files")

# The decoded rows of the largest segment, their planes, the window that zstd makes for a frame that
# is cut off, and as much again for all the rest.
BOUND_BYTES = 4 * MAX_DECODED_BYTES


class Sink(MemoryTempBlock):
    """Takes the decoded rows and keeps only as much as a block of a sample has: the store makes
    room in a tier's budget for the rest.
    """

    def __init__(self, meta: BlockMeta) -> None:
        super().__init__(meta.namespace, meta.key, min(meta.raw_file_bytes, 1 << 16))
        self.file_bytes = meta.raw_file_bytes

    def write_at(self, offset: int, data: object) -> None:
        view = memoryview(data).cast("B")  # type: ignore[arg-type]
        assert 0 <= offset <= offset + view.nbytes <= self.file_bytes
        if offset + view.nbytes <= len(self.data):
            super().write_at(offset, view)


def given_out(mutant: Mutant) -> tuple[BlockMeta, bytes | None]:
    """As a tier's readers do: header, checksums; decoded where it is encoded. Else CorruptBlock."""
    opened = MemoryOpenBlock(mutant.data)
    meta = read_meta(opened.read_at, opened.file_bytes)
    verify_payload(meta, opened.read_at)
    if not meta.encoded:
        temp = Sink(meta)
        transcode.copy_verified(meta, opened, temp, Seconds())
        made = transcode.encode(meta, opened, PLANES, Seconds())
        assert made is None or made.file_bytes < meta.file_bytes
        return meta, mutant.data
    sink = Sink(meta)
    transcode.decode(meta, opened, sink, PLANES, Seconds())
    small = meta.raw_file_bytes <= len(sink.data)
    return meta, bytes(sink.data) if small else None


def judge(mutant: Mutant, meta: BlockMeta, raw: bytes | None) -> str:
    """What was taken for valid has to be so."""
    assert 1 <= meta.rows <= MAX_ROWS
    assert block_key(meta.parent, meta.tokens, meta.extras) == meta.key
    assert sum(s.stored_bytes for s in meta.segments) <= meta.file_bytes == len(mutant.data)
    assert all(s.raw_bytes <= MAX_DECODED_BYTES for s in meta.segments if s.encoded)
    if raw is not None and meta.encoded:  # what is decoded is again a valid block, now raw
        decoded = read_meta(buffer_reader(raw), len(raw))
        assert not decoded.encoded
        assert (decoded.key, decoded.tokens) == (meta.key, meta.tokens)
        verify_payload(decoded, buffer_reader(raw))
    if mutant.trusted:
        return "valid: another block" if raw != mutant.sample.raw else "valid: the same"
    # No checksum was made right: only padding may differ from what was put.
    assert raw is not None
    put_blocks = {one.key: one.raw for one in SAMPLES}
    wanted, got = put_blocks[meta.key], raw
    put = read_meta(buffer_reader(wanted), len(wanted))
    now = read_meta(buffer_reader(got), len(got))
    assert (put.key, put.segments, put.extras) == (now.key, now.segments, now.extras)
    for s in put.segments:
        end = s.file_offset + s.stored_bytes
        assert got[s.file_offset : end] == wanted[s.file_offset : end]
    return "valid: the same" if meta.key == mutant.sample.key else "valid: another block"


def by_client(mutant: Mutant, namespace: Namespace) -> Block:
    """A client that was named this file for the prompt of the sample."""
    one = mutant.sample
    rows = len(one.tokens) // 4
    ref = BlockRef(one.key, 0, rows, rows, "local", len(mutant.data), 0.0)
    return checked(namespace, Match(one.tokens, (ref,)), ref, mutant.data)


def layouts_of_samples() -> KnownLayouts:
    known = KnownLayouts()
    for one in SAMPLES:
        header, offset = read_header(buffer_reader(one.data), len(one.data))
        known.learn(header, offset, len(one.data))
    return known


def by_layout(known: KnownLayouts, data: bytes) -> bool:
    """Whether it is of a known layout. Then it is what the whole check would pass."""
    try:
        header, offset = read_header(buffer_reader(data), len(data))
    except (CorruptBlock, UnsupportedFormat):
        return False
    passes = known.passes(header, offset, len(data))
    if passes:
        meta = check_header(header, offset, len(data))
        assert [s.crc32c for s in header.segments] == [s.crc32c for s in meta.segments]
    return passes


@pytest.mark.timeout(time_limit(INPUTS))
def test_no_bytes_of_a_block_file_do_harm() -> None:
    campaign = Campaign("block files", INPUTS)
    known, of_known_layout = layouts_of_samples(), 0
    with at_most(BOUND_BYTES):
        for number in campaign:
            with campaign.input(number) as rng:
                mutant = mutate(rng, rng.choice(SAMPLES))
                declared = declared_file_bytes(mutant.data)
                assert declared is None or declared >= 0
                of_known_layout += by_layout(known, mutant.data)
                try:
                    outcome = judge(mutant, *given_out(mutant))
                except CorruptBlock:
                    outcome = "corrupt"
                except UnsupportedFormat:
                    outcome = "unknown format"
                namespace = (
                    NS if mutant.sample.namespace == NAMESPACE else samples.namespace(layers=3)
                )
                try:
                    block = by_client(mutant, namespace)
                except (CorruptBlock, UnsupportedFormat):
                    assert outcome != "valid: the same" or mutant.sample.data == mutant.data
                else:
                    assert block.key == mutant.sample.key
                    assert block.meta.tokens == mutant.sample.tokens
                campaign.outcomes[outcome] += 1
    campaign.report()
    assert of_known_layout or len(list(campaign)) < 100
