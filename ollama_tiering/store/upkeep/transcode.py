"""A block from one tier's encoding into another's, every checksum compared on the way.

Decoded, a file is byte for byte the one that was encoded: its header keeps where the payload began.
Neither direction trusts the other: what is encoded has matched the checksum its writer gave it, and
what is decoded has to match that one again.
"""

from __future__ import annotations

import mmap
import threading
import time
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final, Protocol

import numpy as np

from ollama_tiering.store.block import q8_0
from ollama_tiering.store.block.blockfile import (
    PREAMBLE_BYTES,
    BlockMeta,
    buffer_reader,
    damaged,
    pack_head,
    read_meta,
)
from ollama_tiering.store.block.checksum import crc32c
from ollama_tiering.store.block.encoding import MAX_DECODED_BYTES, Encoding, ZstdPlanes, pays
from ollama_tiering.store.block.pb import block_store_pb2 as pb
from ollama_tiering.store.block.segments import ALIGNMENT, Segment, align
from ollama_tiering.store.books.encodings import TierEncodings
from ollama_tiering.store.errors import CorruptBlock
from ollama_tiering.store.tiers.contract import OpenBlock, TempBlock

if TYPE_CHECKING:
    from typing_extensions import Buffer

    from ollama_tiering.store.books.state import Level

MAX_ENCODED_FILE_BYTES: Final = 256 << 20  # held in memory while it is written; larger stay raw

_PART_BYTES: Final = 1 << 20
_COPY_BYTES: Final = 4 << 20


@dataclass(slots=True)
class Seconds:
    """The time that each part of a copy took."""

    reading: float = 0.0
    writing: float = 0.0
    coding: float = 0.0


class Transfer(Protocol):
    """What is to be written of one block, and how."""

    file_bytes: int
    encoded: bool

    def write_to(self, temp: TempBlock, spent: Seconds) -> None:
        """Fills a file of `file_bytes`. CorruptBlock when the source is damaged."""
        ...


def plan(
    meta: BlockMeta, block: OpenBlock, encodings: TierEncodings, target: Level, spent: Seconds
) -> Transfer:
    """How an open block goes to `target`: encoded, decoded or as it is. CorruptBlock."""
    wanted = encodings.of(target)
    rounded = bool(target.index) and encodings.rounds(meta.namespace)
    if meta.encoded and wanted is Encoding.NONE and not (rounded and _only_q8_0(meta)):
        return DecodedBlock(meta, block, encodings.planes)
    if not meta.encoded and (wanted is Encoding.ZSTD or rounded):
        planes = encodings.planes if wanted is Encoding.ZSTD else None
        encoded = encode(meta, block, planes, spent, rounded=rounded)
        if encoded is not None:
            return encoded
    return SameBlock(meta, block)


class EncodedBlock:
    """A whole encoded file in memory."""

    encoded = True

    def __init__(self, file_bytes: int, parts: list[tuple[int, Buffer]]) -> None:
        self.file_bytes = file_bytes
        self._parts = parts

    def write_to(self, temp: TempBlock, spent: Seconds) -> None:
        start = time.perf_counter()
        for offset, data in self._parts:
            with memoryview(data).cast("B") as view:
                for at in range(0, view.nbytes, _PART_BYTES):  # a tier may limit each call's time
                    temp.write_at(offset + at, view[at : at + _PART_BYTES])
        spent.writing += time.perf_counter() - start


class DecodedBlock:
    """The raw form of an encoded block."""

    encoded = False

    def __init__(self, meta: BlockMeta, block: OpenBlock, planes: ZstdPlanes) -> None:
        self.file_bytes = meta.raw_file_bytes
        self._meta, self._block, self._planes = meta, block, planes

    def write_to(self, temp: TempBlock, spent: Seconds) -> None:
        decode(self._meta, self._block, temp, self._planes, spent)


class SameBlock:
    """A copy of the file as it is, whatever its encoding."""

    def __init__(self, meta: BlockMeta, block: OpenBlock) -> None:
        self.file_bytes = meta.file_bytes
        self.encoded = meta.encoded
        self._meta, self._block = meta, block

    def write_to(self, temp: TempBlock, spent: Seconds) -> None:
        copy_verified(self._meta, self._block, temp, spent)


def copy_verified(meta: BlockMeta, block: OpenBlock, temp: TempBlock, spent: Seconds) -> None:
    """Copies a block, page by page as it is, and checks every checksum on the way."""
    clock = time.perf_counter
    checksums = RunningChecksums(meta)
    part = _own.part()
    with temp.writer(pages=meta.file_bytes % ALIGNMENT == 0) as write:
        for offset in range(0, meta.file_bytes, _COPY_BYTES):
            view = part[: meta.file_bytes - offset]
            start = clock()
            block.read_into(offset, view)
            read = clock()
            checksums.add(offset, view)
            checked = clock()
            write(offset, view)
            spent.reading += read - start
            spent.coding += checked - read
            spent.writing += clock() - checked
    checksums.finish()


class _Own(threading.local):
    """Page-aligned memory of each thread that copies: new pages cost more than copying them."""

    _memory: memoryview | None = None

    def part(self) -> memoryview:
        if self._memory is None:
            self._memory = memoryview(mmap.mmap(-1, _COPY_BYTES))
        return self._memory


_own = _Own()


class RunningChecksums:
    """Checks the segments of a block while its file passes by in parts, in order."""

    def __init__(self, meta: BlockMeta) -> None:
        self._left = list(reversed(meta.segments))
        self._crc = 0

    def add(self, offset: int, part: memoryview) -> None:
        """CorruptBlock at the end of a segment that is damaged."""
        while self._left:
            segment = self._left[-1]
            start, end = segment.file_offset, segment.file_offset + segment.stored_bytes
            if start >= offset + part.nbytes:
                return
            self._crc = crc32c(part[max(0, start - offset) : end - offset], self._crc)
            if end > offset + part.nbytes:
                return
            if self._crc != segment.crc32c:
                raise damaged(segment)
            self._left.pop()
            self._crc = 0

    def finish(self) -> None:
        if self._left:
            raise CorruptBlock("the file ends before its last segment")


def encode(
    meta: BlockMeta,
    block: OpenBlock,
    planes: ZstdPlanes | None,
    spent: Seconds,
    *,
    rounded: bool = False,
) -> EncodedBlock | None:
    """The encoded form of a raw block; None when it is better kept as it is. CorruptBlock.

    `rounded` says that its rows are q8_0's and may be kept as such; other segments go to `planes`.
    """
    if meta.encoded or meta.file_bytes > MAX_ENCODED_FILE_BYTES or not _dense(meta):
        return None
    header = _header(meta, block)
    payload: list[tuple[int, Buffer]] = []
    offset = 0
    for segment, field in zip(meta.segments, header.segments, strict=True):
        raw = _read(block, segment, spent)
        start = time.perf_counter()
        stored = _encode_segment(raw, field, planes, rounded=rounded)
        field.offset = offset
        spent.coding += time.perf_counter() - start
        payload.append((offset, stored))
        offset += field.stored_bytes
    header.raw_payload_offset = meta.payload_offset
    payload_offset = align(PREAMBLE_BYTES + header.ByteSize())
    some = any(field.encoding != pb.ENCODING_RAW for field in header.segments)
    file_bytes = payload_offset + align(offset)
    if not some or not pays(file_bytes, meta.file_bytes):
        return None
    head = pack_head(header.SerializeToString(deterministic=True), payload_offset)
    parts = [(0, head), *((payload_offset + at, data) for at, data in payload)]
    return EncodedBlock(file_bytes, parts)


def _encode_segment(
    raw: bytes, field: pb.Segment, planes: ZstdPlanes | None, *, rounded: bool
) -> Buffer:
    """What to store for one segment; its header field is changed to say so."""
    if len(raw) > MAX_DECODED_BYTES:
        return raw
    codes = q8_0.codes_of(raw) if rounded and field.dtype == q8_0.DTYPE else None
    stored: Buffer = raw
    if codes is not None:
        stored = codes.data
        field.encoding = pb.ENCODING_Q8_0
    elif planes is not None:
        frames = planes.encode(raw, field.dtype)
        if not pays(sum(map(len, frames)), len(raw)):
            return raw
        stored = b"".join(frames)
        field.encoding = pb.ENCODING_ZSTD
        field.plane_bytes[:] = map(len, frames)
    else:
        return raw
    field.stored_bytes = memoryview(stored).nbytes
    field.crc32c, field.raw_crc32c = crc32c(stored), field.crc32c
    return stored


def decode(
    meta: BlockMeta, block: OpenBlock, temp: TempBlock, planes: ZstdPlanes, spent: Seconds
) -> None:
    """Writes the raw form of an encoded block; `temp` has `meta.raw_file_bytes`. CorruptBlock."""
    if meta.file_bytes > MAX_ENCODED_FILE_BYTES:
        raise CorruptBlock(f"no writer makes an encoded file of {meta.file_bytes} bytes")
    header = _header(meta, block)
    header.ClearField("raw_payload_offset")
    scratch = np.empty(max(s.raw_bytes if s.encoded else 0 for s in meta.segments), np.uint8)
    offset = 0
    for segment, field in zip(meta.segments, header.segments, strict=True):
        stored = _read(block, segment, spent)
        start = time.perf_counter()
        raw: Buffer = stored
        if segment.encoding == pb.ENCODING_ZSTD:
            raw = planes.decode(
                stored, segment.plane_bytes, segment.dtype, segment.raw_bytes, scratch
            ).data
        elif segment.encoding == pb.ENCODING_Q8_0:
            raw = q8_0.rows_of(stored).data
        if segment.encoded and crc32c(raw) != segment.raw_crc32c:
            raise CorruptBlock(f"layer {segment.layer} is not what was encoded")
        decoded = time.perf_counter()
        temp.write_at(meta.raw_payload_offset + offset, raw)
        spent.coding += decoded - start
        spent.writing += time.perf_counter() - decoded
        field.encoding = pb.ENCODING_RAW
        field.offset = offset
        field.stored_bytes, field.crc32c = segment.raw_bytes, segment.raw_crc32c
        field.ClearField("raw_crc32c")
        field.ClearField("plane_bytes")
        offset += align(segment.raw_bytes)
    head = header.SerializeToString(deterministic=True)
    if PREAMBLE_BYTES + len(head) > meta.raw_payload_offset:
        raise CorruptBlock("the header does not fit where the decoded file had it")
    temp.write_at(0, pack_head(head, meta.raw_payload_offset))


def round_rows(meta: BlockMeta, block: OpenBlock, temp: TempBlock) -> None:
    """Rounds the f16 rows of a raw block to q8_0 where they lie, before anybody may see them.

    What q8_0 cannot hold (not finite, not whole blocks of 32) stays as it is. CorruptBlock.
    """
    header = _header(meta, block)
    for segment, field in zip(meta.segments, header.segments, strict=True):
        raw = _read(block, segment, Seconds())
        rounded = q8_0.round_rows(raw) if segment.dtype == q8_0.DTYPE else None
        if rounded is not None:
            temp.write_at(segment.file_offset, rounded.data)
            field.crc32c = crc32c(rounded.data)
    temp.write_at(0, pack_head(header.SerializeToString(deterministic=True), meta.payload_offset))


def _header(meta: BlockMeta, block: OpenBlock) -> pb.BlockHeader:
    """The header as a message, with all its fields; read again, so checked again."""
    head = block.read_at(0, meta.payload_offset)
    if read_meta(buffer_reader(head), meta.file_bytes) != meta:
        raise CorruptBlock("the header changed while the block was read")
    header_bytes = int.from_bytes(head[12:16], "little")
    return pb.BlockHeader.FromString(head[PREAMBLE_BYTES : PREAMBLE_BYTES + header_bytes])


def _read(block: OpenBlock, segment: Segment, spent: Seconds) -> bytes:
    start = time.perf_counter()
    end = segment.file_offset + segment.stored_bytes
    parts = [
        block.read_at(at, min(_PART_BYTES, end - at))
        for at in range(segment.file_offset, end, _PART_BYTES)
    ]
    stored = parts[0] if len(parts) == 1 else b"".join(parts)
    read = time.perf_counter()
    matches = crc32c(stored) == segment.crc32c
    spent.reading += read - start
    spent.coding += time.perf_counter() - read
    if not matches:
        raise damaged(segment)
    return stored


def _only_q8_0(meta: BlockMeta) -> bool:
    """Whether what is encoded is encoded as rows of a rounded namespace always are on a disk."""
    return all(s.encoding in (pb.ENCODING_RAW, pb.ENCODING_Q8_0) for s in meta.segments)


def _dense(meta: BlockMeta) -> bool:
    """Whether the segments follow each other as a decoded file has them."""
    at = meta.payload_offset
    for segment in meta.segments:
        if segment.file_offset != at:
            return False
        at += align(segment.stored_bytes)
    return True
