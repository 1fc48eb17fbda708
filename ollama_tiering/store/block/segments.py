"""The segments of a block file: one for each layer's K and V, each with its place and checksum."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

from ollama_tiering.store.block.encoding import ENCODINGS, plausible
from ollama_tiering.store.block.pb import block_store_pb2 as pb
from ollama_tiering.store.errors import CorruptBlock, UnsupportedFormat

ALIGNMENT: Final = 4096
MAX_SEGMENTS: Final = 4096


@dataclass(frozen=True, slots=True)
class SegmentShape:
    """A segment to be written: which one it is, and how wide its rows are."""

    child: int
    layer: int
    kind: pb.SegmentKind
    dtype: str
    row_bytes: int


@dataclass(frozen=True, slots=True)
class Segment:
    """One segment of a block file, with its place from the start of the file."""

    child: int
    layer: int
    kind: pb.SegmentKind
    dtype: str
    row_bytes: int
    file_offset: int
    stored_bytes: int
    crc32c: int
    raw_bytes: int
    raw_crc32c: int
    encoding: pb.Encoding
    plane_bytes: tuple[int, ...]  # frames of a segment in zstd

    @property
    def encoded(self) -> bool:
        return self.encoding != pb.ENCODING_RAW


def align(length: int) -> int:
    return -(-length // ALIGNMENT) * ALIGNMENT


def checked_segments(
    header: pb.BlockHeader, rows: int, payload_offset: int, file_bytes: int
) -> tuple[Segment, ...]:
    if not 1 <= len(header.segments) <= MAX_SEGMENTS:
        raise CorruptBlock(f"{len(header.segments)} segments are not 1 to {MAX_SEGMENTS}")
    if any(s.encoding not in ENCODINGS for s in header.segments):
        raise UnsupportedFormat("a segment has an unknown encoding")
    # Nobody maps the segments of an encoded file: no space is lost between them.
    unit = 1 if any(s.encoding != pb.ENCODING_RAW for s in header.segments) else ALIGNMENT
    segments = []
    order: tuple[int, int, int] | None = None
    end = 0
    for s in header.segments:
        place = (s.child, s.layer, int(s.kind))
        known = s.kind in (pb.SEGMENT_KIND_K, pb.SEGMENT_KIND_V)
        if not known or (order is not None and place <= order):
            raise CorruptBlock("segments are out of order")
        if s.offset % unit or s.offset < end:
            raise CorruptBlock("segments overlap or are not aligned")
        raw_bytes, encoded = rows * s.row_bytes, s.encoding != pb.ENCODING_RAW
        if not s.stored_bytes or not plausible(s, raw_bytes):
            raise CorruptBlock("segment length is not rows times row bytes")
        if payload_offset + s.offset + s.stored_bytes > file_bytes:
            raise CorruptBlock("segment lies outside the file")
        order, end = place, s.offset + s.stored_bytes
        segments.append(
            Segment(
                child=s.child,
                layer=s.layer,
                kind=s.kind,
                dtype=s.dtype,
                row_bytes=s.row_bytes,
                file_offset=payload_offset + s.offset,
                stored_bytes=s.stored_bytes,
                crc32c=s.crc32c,
                raw_bytes=raw_bytes,
                raw_crc32c=s.raw_crc32c if encoded else s.crc32c,
                encoding=s.encoding,
                plane_bytes=tuple(s.plane_bytes) if encoded else (),
            )
        )
    if payload_offset + align(end) != file_bytes:
        raise CorruptBlock("file does not end where its last segment does")
    return tuple(segments)
