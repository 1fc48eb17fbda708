"""The block file, format version 1 (docs/format.md): one block, all layers, K and V.

Pure over `ReadAt`; every limit is checked before anything is allocated. A file is written once and
never modified.
"""

from __future__ import annotations

import struct
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

from google.protobuf.message import DecodeError

from ollama_tiering.store.block.checksum import crc32c
from ollama_tiering.store.block.key import (
    DIGEST_BYTES,
    FINGERPRINT_BYTES,
    FORMAT_VERSION,
    TOKEN_BYTES,
    BlockExtra,
    BlockKey,
    NamespaceId,
    block_key,
    rows_fingerprint,
)
from ollama_tiering.store.block.pb import block_store_pb2 as pb
from ollama_tiering.store.block.segments import (
    ALIGNMENT,
    MAX_SEGMENTS,
    Segment,
    SegmentShape,
    align,
    checked_segments,
)
from ollama_tiering.store.block.window_fields import check_window_fields, plain_rows_of_window
from ollama_tiering.store.errors import CorruptBlock, UnsupportedFormat

if TYPE_CHECKING:
    from typing_extensions import Buffer

MAGIC: Final = b"KVTBLK\r\n"
PREAMBLE_BYTES: Final = 32
MAX_HEADER_BYTES: Final = 1 << 20
MAX_ROWS: Final = 4096
MAX_FILE_BYTES: Final = 1 << 40

_PREAMBLE: Final = struct.Struct("<8sIIQI")  # without the CRC over itself
_COPY_BYTES: Final = 1 << 20

ReadAt = Callable[[int, int], bytes]  # (offset, length) -> exactly that many bytes, or raises


@dataclass(frozen=True, slots=True)
class BlockMeta:
    """What a valid header says."""

    namespace: NamespaceId
    key: BlockKey
    parent: bytes
    first_position: int
    tokens: bytes  # int32 little endian
    extras: tuple[BlockExtra, ...]
    segments: tuple[Segment, ...]
    payload_offset: int
    file_bytes: int
    created_unix_seconds: int
    raw_payload_offset: int  # once decoded; payload_offset when nothing is encoded
    cells: tuple[int, ...] = ()  # of a window block: where its rows lay
    others: tuple[BlockKey, ...] = ()  # ... which other blocks its window has, if it names them
    fingerprint: bytes = b""  # which rows these are; empty where the tokens decide their bits

    @property
    def encoded(self) -> bool:
        return any(segment.encoded for segment in self.segments)

    @property
    def raw_file_bytes(self) -> int:
        """Size of the decoded file, which is what a client sees."""
        if not self.encoded:
            return self.file_bytes
        return self.raw_payload_offset + sum(align(s.raw_bytes) for s in self.segments)

    @property
    def rows(self) -> int:
        return len(self.tokens) // TOKEN_BYTES

    @property
    def plain_rows(self) -> int:
        """Leading rows with nothing but a token; these may match in part. < 0: a window block."""
        if self.cells:
            return plain_rows_of_window(self.extras, self.segments[0].child, self.rows)
        return self.extras[0].row if self.extras else self.rows


class BlockPlan:
    """The places of all parts of a block; its payload is not known yet."""

    def __init__(self, header: pb.BlockHeader) -> None:
        self._header = header
        # The checksums are placeholders and not zero, so no finished header is longer.
        self.payload_offset = align(PREAMBLE_BYTES + header.ByteSize())
        self.file_bytes = self.payload_offset + _payload_bytes(header)
        self.key = BlockKey(header.key)
        self.rows = len(header.tokens) // TOKEN_BYTES
        self.tokens = header.tokens

    @property
    def spans(self) -> list[tuple[int, int]]:
        """Pairs (offset in the file, bytes) of the segments, in the order of the shapes."""
        return [(self.payload_offset + s.offset, s.stored_bytes) for s in self._header.segments]

    def head(self, checksums: Sequence[int]) -> bytes:
        """Preamble, header and padding: the bytes of the file before its payload."""
        header = pb.BlockHeader()
        header.CopyFrom(self._header)
        for segment, checksum in zip(header.segments, checksums, strict=True):
            segment.crc32c = checksum
        return pack_head(header.SerializeToString(deterministic=True), self.payload_offset)


def pack_head(header: bytes, payload_offset: int, *, version: int = FORMAT_VERSION) -> bytes:
    preamble = _PREAMBLE.pack(MAGIC, version, len(header), payload_offset, crc32c(header))
    preamble += struct.pack("<I", crc32c(preamble))
    return (preamble + header).ljust(payload_offset, b"\0")


def plan_block(
    *,
    namespace: NamespaceId,
    parent: bytes,
    tokens: bytes,
    first_position: int,
    shapes: Sequence[SegmentShape],
    extras: Sequence[BlockExtra] = (),
    cells: Sequence[int] = (),
    others: Sequence[BlockKey] = (),
    created_unix_seconds: int | None = None,
    fingerprint: bytes = b"",
) -> BlockPlan:
    """Lays out one block of raw segments. `shapes` are ordered by (child, layer, kind)."""
    rows = len(tokens) // TOKEN_BYTES
    if not 1 <= rows <= MAX_ROWS or len(tokens) % TOKEN_BYTES:
        raise ValueError(f"a block has 1 to {MAX_ROWS} rows, not {len(tokens) / TOKEN_BYTES:g}")
    order = [(shape.child, shape.layer, shape.kind) for shape in shapes]
    if order != sorted(set(order)) or not 1 <= len(order) <= MAX_SEGMENTS:
        raise ValueError("segments must be unique and ordered by (child, layer, kind)")
    created = int(time.time()) if created_unix_seconds is None else created_unix_seconds
    header = pb.BlockHeader(
        namespace=namespace,
        key=block_key(parent, tokens, extras, fingerprint),
        parent=parent,
        first_position=first_position,
        tokens=tokens,
        extras=[pb.Extra(row=extra.row, digest=extra.digest) for extra in extras],
        cells=cells,
        window=others,
        created_unix_seconds=created,
        fingerprint=fingerprint,
    )
    offset = 0
    for shape in shapes:
        stored_bytes = rows * shape.row_bytes
        header.segments.add(
            child=shape.child,
            layer=shape.layer,
            kind=shape.kind,
            encoding=pb.ENCODING_RAW,
            dtype=shape.dtype,
            row_bytes=shape.row_bytes,
            offset=offset,
            stored_bytes=stored_bytes,
            crc32c=1,
        )
        offset += align(stored_bytes)
    return BlockPlan(header)


def encode_block(plan: BlockPlan, payload: Sequence[Buffer]) -> bytes:
    """The whole file in memory, for inline transfer. The fast path fills a file in place."""
    out = bytearray(plan.file_bytes)
    checksums = []
    for (offset, stored_bytes), data in zip(plan.spans, payload, strict=True):
        view = memoryview(data).cast("B")
        if view.nbytes != stored_bytes:
            raise ValueError(f"segment has {view.nbytes} bytes, its shape says {stored_bytes}")
        out[offset : offset + stored_bytes] = view
        checksums.append(crc32c(view))
    head = plan.head(checksums)
    out[: len(head)] = head
    return bytes(out)


def read_meta(read_at: ReadAt, file_bytes: int) -> BlockMeta:
    """Reads and checks preamble and header. CorruptBlock, UnsupportedFormat, or OSError."""
    header, payload_offset = read_header(read_at, file_bytes)
    return check_header(header, payload_offset, file_bytes)


def read_header(read_at: ReadAt, file_bytes: int) -> tuple[pb.BlockHeader, int]:
    """The header as it was written, and where the payload begins. Its checksum is checked, not what
    it says: `check_header` does that. CorruptBlock, UnsupportedFormat, or OSError.
    """
    if file_bytes < PREAMBLE_BYTES:
        raise CorruptBlock(f"{file_bytes} bytes are too few for a block file")
    preamble = read_at(0, PREAMBLE_BYTES)
    magic, version, header_bytes, payload_offset, header_crc = _PREAMBLE.unpack_from(preamble)
    (preamble_crc,) = struct.unpack_from("<I", preamble, _PREAMBLE.size)
    if magic != MAGIC:
        raise CorruptBlock("no block file: wrong magic")
    if crc32c(preamble[: _PREAMBLE.size]) != preamble_crc:
        raise CorruptBlock("preamble checksum does not match")
    if version != FORMAT_VERSION:
        raise UnsupportedFormat(f"block format version {version} is unknown")
    if header_bytes > MAX_HEADER_BYTES:
        raise CorruptBlock(f"header of {header_bytes} bytes is longer than allowed")
    if payload_offset % ALIGNMENT or payload_offset < PREAMBLE_BYTES + header_bytes:
        raise CorruptBlock(f"payload offset {payload_offset} is impossible")
    if payload_offset > file_bytes:
        raise CorruptBlock("file is truncated in its header")
    data = read_at(PREAMBLE_BYTES, header_bytes)
    if crc32c(data) != header_crc:
        raise CorruptBlock("header checksum does not match")
    header = pb.BlockHeader()
    try:
        header.ParseFromString(data)
    except DecodeError:
        raise CorruptBlock("header is no BlockHeader") from None
    return header, payload_offset


def check_place(meta: BlockMeta, namespace: NamespaceId, key: BlockKey) -> None:
    """CorruptBlock if a valid file lies under the name of another block."""
    if (meta.namespace, meta.key) != (namespace, key):
        raise CorruptBlock("the file lies where another block belongs")


def declared_file_bytes(head: Buffer) -> int | None:
    """The file's size by the header in these first bytes; None if that is incomplete."""
    view = memoryview(head).cast("B")
    if view.nbytes < PREAMBLE_BYTES:
        return None
    _, _, header_bytes, payload_offset, _ = _PREAMBLE.unpack_from(view)
    if view.nbytes < PREAMBLE_BYTES + min(header_bytes, MAX_HEADER_BYTES):
        return None
    header = pb.BlockHeader()
    try:
        header.ParseFromString(bytes(view[PREAMBLE_BYTES : PREAMBLE_BYTES + header_bytes]))
    except DecodeError:
        return PREAMBLE_BYTES
    return payload_offset + _payload_bytes(header) if header.segments else PREAMBLE_BYTES


def verify_payload(meta: BlockMeta, read_at: ReadAt) -> None:
    """Checks the CRC-32C of every segment. CorruptBlock names the first one that does not match."""
    for segment in meta.segments:
        crc = 0
        end = segment.file_offset + segment.stored_bytes
        for start in range(segment.file_offset, end, _COPY_BYTES):
            crc = crc32c(read_at(start, min(_COPY_BYTES, end - start)), crc)
        if crc != segment.crc32c:
            raise damaged(segment)


def verify_buffer(meta: BlockMeta, data: Buffer) -> None:
    """Works as `verify_payload`, for a whole file in memory, without copying it."""
    with memoryview(data) as whole, whole.cast("B") as view:
        for segment in meta.segments:
            end = segment.file_offset + segment.stored_bytes
            if crc32c(view[segment.file_offset : end]) != segment.crc32c:
                raise damaged(segment)


def damaged(segment: Segment) -> CorruptBlock:
    return CorruptBlock(
        f"checksum of child {segment.child} layer {segment.layer} "
        f"{pb.SegmentKind.Name(segment.kind)} does not match"
    )


def buffer_reader(data: Buffer) -> ReadAt:
    view = memoryview(data).cast("B")

    def read_at(offset: int, length: int) -> bytes:
        if offset + length > view.nbytes:
            raise CorruptBlock("file is shorter than its header says")
        return bytes(view[offset : offset + length])

    return read_at


def check_header(header: pb.BlockHeader, payload_offset: int, file_bytes: int) -> BlockMeta:
    """What a header says, if all of it makes sense. CorruptBlock or UnsupportedFormat."""
    for name in ("namespace", "key", "parent"):
        if len(getattr(header, name)) != DIGEST_BYTES:
            raise CorruptBlock(f"{name} has not {DIGEST_BYTES} bytes")
    rows, rest = divmod(len(header.tokens), TOKEN_BYTES)
    if rest or not 1 <= rows <= MAX_ROWS:
        raise CorruptBlock(f"{len(header.tokens)} bytes of tokens are not 1 to {MAX_ROWS} rows")
    extras = tuple(BlockExtra(extra.row, extra.digest) for extra in header.extras)
    places = [extra.row for extra in extras]
    if places != sorted(places) or (places and places[-1] >= rows):
        raise CorruptBlock("extras are out of order or outside the block")
    check_window_fields(header, rows)
    segments = checked_segments(header, rows, payload_offset, file_bytes)
    raw_offset, encoded = header.raw_payload_offset, any(s.encoded for s in segments)
    if encoded and (raw_offset % ALIGNMENT or not 0 < raw_offset <= 2 * MAX_HEADER_BYTES):
        raise CorruptBlock(f"payload offset {raw_offset} of the decoded file is impossible")
    if not is_its_rows(header):
        raise CorruptBlock("fingerprint is not that of the checksums in the header")
    if block_key(header.parent, header.tokens, extras, header.fingerprint) != header.key:
        raise CorruptBlock("key is not that of the parent and tokens in the header")
    meta = BlockMeta(
        namespace=NamespaceId(header.namespace),
        key=BlockKey(header.key),
        parent=header.parent,
        first_position=header.first_position,
        tokens=header.tokens,
        extras=extras,
        segments=segments,
        payload_offset=payload_offset,
        file_bytes=file_bytes,
        created_unix_seconds=header.created_unix_seconds,
        raw_payload_offset=raw_offset if encoded else payload_offset,
        cells=tuple(header.cells),
        others=tuple(map(BlockKey, header.window)),
        fingerprint=header.fingerprint,
    )
    if encoded and meta.raw_file_bytes <= file_bytes:
        raise CorruptBlock("an encoded file is not smaller than the raw one")
    return meta


def is_its_rows(header: pb.BlockHeader) -> bool:
    """Whether the rows are those that the key names; of an encoded block only decoding tells."""
    if not header.fingerprint:
        return True
    if any(segment.encoding != pb.ENCODING_RAW for segment in header.segments):
        return len(header.fingerprint) == FINGERPRINT_BYTES
    return header.fingerprint == rows_fingerprint(
        struct.pack(f"<{len(header.segments)}I", *(s.crc32c for s in header.segments))
    )


def _payload_bytes(header: pb.BlockHeader) -> int:
    last = header.segments[-1]
    return align(last.offset + last.stored_bytes)
