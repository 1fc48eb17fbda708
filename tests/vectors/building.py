"""How block files for the vectors are made: whole ones, and parts of them changed."""

from __future__ import annotations

import hashlib
import struct
from collections.abc import Callable, Sequence

from ollama_tiering.store.block import blockfile
from ollama_tiering.store.block.blockfile import encode_block, pack_head, plan_block
from ollama_tiering.store.block.key import BlockExtra, BlockKey, block_key, tokens_to_bytes
from ollama_tiering.store.block.pb import block_store_pb2 as pb
from ollama_tiering.store.block.segments import SegmentShape, align
from tests.vectors.keys import namespaces

K, V = pb.SEGMENT_KIND_K, pb.SEGMENT_KIND_V
CREATED = 1_763_700_000  # Unix seconds
IMAGE = hashlib.sha256(b"image").digest()

# Name -> (expect, why, content); blocks.json says what the values of `expect` mean.
Files = dict[str, tuple[str, str, bytes]]

Change = Callable[[pb.BlockHeader], object]


def segment_bytes(shape: SegmentShape, rows: int) -> bytes:
    """Different in every byte's neighbourhood: SHA-256 of place and counter."""
    out = b""
    counter = 0
    while len(out) < rows * shape.row_bytes:
        out += hashlib.sha256(
            f"{shape.child}/{shape.layer}/{shape.kind}/{counter}".encode()
        ).digest()
        counter += 1
    return out[: rows * shape.row_bytes]


def block(
    tokens: list[int],
    shapes: list[SegmentShape],
    *,
    namespace: str = "qwen3",
    extras: Sequence[BlockExtra] = (),
    first_position: int = 0,
    parent: bytes | None = None,
    cells: Sequence[int] = (),
    others: Sequence[BlockKey] = (),
) -> bytes:
    """A whole file. `parent`: the namespace if it is not given."""
    digest = namespaces()[namespace].digest()
    plan = plan_block(
        namespace=digest,
        parent=digest if parent is None else parent,
        tokens=tokens_to_bytes(tokens),
        first_position=first_position,
        shapes=shapes,
        extras=extras,
        cells=cells,
        others=others,
        created_unix_seconds=CREATED,
    )
    return encode_block(plan, [segment_bytes(shape, len(tokens)) for shape in shapes])


def kv(child: int, layer: int, row_bytes: int = 16, dtype: str = "f16") -> list[SegmentShape]:
    return [SegmentShape(child, layer, kind, dtype, row_bytes) for kind in (K, V)]


def flipped(data: bytes, offset: int, bit: int = 0) -> bytes:
    out = bytearray(data)
    out[offset] ^= 1 << bit
    return bytes(out)


def parts(data: bytes) -> tuple[pb.BlockHeader, int, bytes]:
    """Header, payload offset and payload of an intact file."""
    header_bytes, payload_offset = struct.unpack_from("<IQ", data, 12)
    header = pb.BlockHeader.FromString(data[32 : 32 + header_bytes])
    return header, payload_offset, data[payload_offset:]


def reheaded(data: bytes, change: Change, *, payload: bytes | None = None) -> bytes:
    """The same payload, or another, below a changed header whose checksums are right."""
    header, payload_offset, old = parts(data)
    change(header)
    serialized = header.SerializeToString(deterministic=True)
    offset = max(payload_offset, align(32 + len(serialized)))
    return pack_head(serialized, offset) + (old if payload is None else payload)


def rekeyed(change: Change) -> Change:
    """The change, and then the key of what the header says after it."""

    def both(header: pb.BlockHeader) -> None:
        change(header)
        extras = [BlockExtra(extra.row, extra.digest) for extra in header.extras]
        header.key = block_key(header.parent, header.tokens, extras)

    return both


def segment(index: int, **values: int) -> Change:
    """Sets fields of one segment."""

    def change(header: pb.BlockHeader) -> None:
        for name, value in values.items():
            setattr(header.segments[index], name, value)

    return change


def pack_preamble(version: int, header_bytes: int, payload_offset: int, header_crc: int) -> bytes:
    preamble = struct.pack(
        "<8sIIQI", blockfile.MAGIC, version, header_bytes, payload_offset, header_crc
    )
    return preamble + struct.pack("<I", blockfile.crc32c(preamble))
