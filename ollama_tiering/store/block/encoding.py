"""How the bytes of a segment may be stored: as they are, or as zstd frames of their byte planes.

Pure. A frame is decoded into exactly the bytes its header may claim, never more: the size a frame
states is compared with what the segment's rows say before anything is allocated.
"""

from __future__ import annotations

import threading
from collections.abc import Sequence
from enum import Enum
from typing import TYPE_CHECKING, Final

import zstandard

from ollama_tiering.store.block import planes, q8_0
from ollama_tiering.store.block.pb import block_store_pb2 as pb
from ollama_tiering.store.errors import CorruptBlock

if TYPE_CHECKING:
    from typing_extensions import Buffer

DEFAULT_ZSTD_LEVEL: Final = 1
MAX_DECODED_BYTES: Final = 64 << 20  # of one segment; a larger one is always stored raw
ENCODINGS: Final = (pb.ENCODING_RAW, pb.ENCODING_ZSTD, pb.ENCODING_Q8_0)
MIN_SAVED: Final = 0.05  # share of the bytes below which it does not pay


class Encoding(Enum):
    """What a tier writes; blocks that would not get smaller stay raw under each of them."""

    NONE = "none"
    ZSTD = "zstd"


class ZstdPlanes:
    """Encodes and decodes segments. Thread-safe: contexts are one per thread."""

    def __init__(self, level: int = DEFAULT_ZSTD_LEVEL) -> None:
        self._level = level
        self._local = threading.local()

    def encode(self, raw: Buffer, dtype: str) -> list[bytes]:
        """One frame per plane of `raw`."""
        compressor = getattr(self._local, "compressor", None)
        if compressor is None:
            compressor = zstandard.ZstdCompressor(level=self._level)
            self._local.compressor = compressor
        return [compressor.compress(plane.data) for plane in planes.split(raw, dtype)]

    def decode(
        self,
        stored: Buffer,
        frame_bytes: Sequence[int],
        dtype: str,
        raw_bytes: int,
        scratch: planes.Bytes | None = None,
    ) -> planes.Bytes:
        """The `raw_bytes` bytes that were encoded, in `scratch` if they fit there. CorruptBlock
        when the frames are not theirs.
        """
        sizes = planes.plane_sizes(dtype, raw_bytes)
        view = memoryview(stored).cast("B")
        if len(sizes) != len(frame_bytes) or sum(frame_bytes) != view.nbytes:
            raise CorruptBlock("the planes of a segment do not fit its rows")
        decoded = []
        start = 0
        for size, length in zip(sizes, frame_bytes, strict=True):
            decoded.append(self._frame(view[start : start + length], size))
            start += length
        return planes.join(decoded, dtype, raw_bytes, scratch)

    def _frame(self, frame: memoryview, plane_bytes: int) -> bytes:
        decompressor = getattr(self._local, "decompressor", None)
        if decompressor is None:
            decompressor = self._local.decompressor = zstandard.ZstdDecompressor()
        try:
            if zstandard.frame_content_size(frame) != plane_bytes:
                raise CorruptBlock("a plane's frame is of another size than its rows")
            data: bytes = decompressor.decompress(frame)
        except zstandard.ZstdError as error:
            raise CorruptBlock(f"a plane's frame cannot be decoded: {error}") from None
        if len(data) != plane_bytes:
            raise CorruptBlock("a plane's frame is of another size than it says")
        return data


def plausible(segment: pb.Segment, raw_bytes: int) -> bool:
    """Whether so many rows can be stored in the bytes the segment says, in its encoding."""
    stored_bytes = segment.stored_bytes
    if segment.encoding == pb.ENCODING_RAW:
        return stored_bytes == raw_bytes
    if not stored_bytes < raw_bytes <= MAX_DECODED_BYTES:
        return False
    if segment.encoding == pb.ENCODING_Q8_0:
        blocks, rest = divmod(raw_bytes, q8_0.RAW_BYTES)
        return not rest and stored_bytes == blocks * q8_0.CODE_BYTES
    return sum(segment.plane_bytes) == stored_bytes


def pays(stored_bytes: int, raw_bytes: int) -> bool:
    """Whether storing so many bytes instead is worth the decoding."""
    return stored_bytes <= (1 - MIN_SAVED) * raw_bytes
