"""Valid block files of every encoding, and what damage, chance or malice makes of them."""

from __future__ import annotations

import functools
import random
import struct
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import zstandard
from google.protobuf.descriptor import FieldDescriptor
from google.protobuf.message import DecodeError, Message

from measure.store import samples
from ollama_tiering.store.block import q8_0
from ollama_tiering.store.block.blockfile import (
    PREAMBLE_BYTES,
    encode_block,
    pack_head,
    plan_block,
    read_meta,
)
from ollama_tiering.store.block.checksum import crc32c
from ollama_tiering.store.block.encoding import MAX_DECODED_BYTES, ZstdPlanes
from ollama_tiering.store.block.key import (
    BlockExtra,
    BlockKey,
    NamespaceId,
    block_key,
    tokens_to_bytes,
)
from ollama_tiering.store.block.pb import block_store_pb2 as pb
from ollama_tiering.store.block.segments import ALIGNMENT, SegmentShape
from ollama_tiering.store.tiers.memory import MemoryOpenBlock, MemoryTempBlock
from ollama_tiering.store.upkeep import transcode
from ollama_tiering.store.upkeep.transcode import Seconds

ROWS = 4
WIDTH = 1024  # elements of a row
NS = samples.namespace("fuzz", layers=1, head_dim=WIDTH, block_tokens=ROWS)
NAMESPACE = NS.digest()
PLANES = ZstdPlanes()
KINDS = (pb.SEGMENT_KIND_K, pb.SEGMENT_KIND_V)

EDGES = sorted(
    {
        edge + step
        for power in (0, 3, 7, 8, 12, 15, 16, 20, 26, 31, 32, 40, 62, 63, 64)
        for edge in (1 << power, -(1 << power))
        for step in (-1, 0, 1)
    }
)


@dataclass(frozen=True)
class Sample:
    """A whole file. `raw` is what it decodes to, byte for byte."""

    name: str
    key: BlockKey
    namespace: NamespaceId
    tokens: bytes
    raw: bytes
    data: bytes


@dataclass(frozen=True)
class Mutant:
    """`trusted`: every checksum was made right again, so that only the other checks are left."""

    sample: Sample
    data: bytes
    how: str
    trusted: bool = False


def raw_block(
    first_token: int, *, extras: tuple[BlockExtra, ...] = (), rounded: bool = False
) -> bytes:
    plan = plan_block(
        namespace=NAMESPACE,
        parent=NAMESPACE,
        tokens=tokens_to_bytes(range(first_token, first_token + ROWS)),
        first_position=0,
        shapes=[SegmentShape(0, 0, kind, "f16", 2 * WIDTH) for kind in KINDS],
        extras=extras,
        created_unix_seconds=1_763_700_000,
    )
    rng = np.random.default_rng(abs(first_token))
    coarse = [np.round(rng.standard_normal(ROWS * WIDTH) * 8) / 8 for _ in KINDS]
    rows = [part.astype(np.float16).data.cast("B") for part in coarse]
    if rounded:
        rows = [memoryview(q8_0.round_rows(part)) for part in rows]  # type: ignore[arg-type]
    return encode_block(plan, rows)


def encoded(data: bytes, *, rounded: bool = False) -> bytes:
    """In zstd, or in q8_0 what was rounded to it."""
    opened = MemoryOpenBlock(data)
    meta = read_meta(opened.read_at, opened.file_bytes)
    planes = None if rounded else PLANES
    made = transcode.encode(meta, opened, planes, Seconds(), rounded=rounded)
    assert made is not None
    temp = MemoryTempBlock(meta.namespace, meta.key, made.file_bytes)
    made.write_to(temp, Seconds())
    return bytes(temp.data)


def sample(name: str, data: bytes, raw: bytes) -> Sample:
    opened = MemoryOpenBlock(data)
    meta = read_meta(opened.read_at, opened.file_bytes)
    return Sample(name, meta.key, meta.namespace, meta.tokens, raw, data)


def make_samples(first_token: int = 100) -> list[Sample]:
    plain = raw_block(first_token)
    image = raw_block(first_token + 10, extras=(BlockExtra(1, b"d" * 32), BlockExtra(3, b"")))
    rounded = raw_block(first_token + 20, rounded=True)
    wide = raw_block(first_token + 30)
    tiny = samples.sequence(samples.namespace(layers=3), [7, 8, 9])[0].data
    return [
        sample("raw", plain, plain),
        sample("raw with extras", image, image),
        sample("small raw", tiny, tiny),
        sample("zstd", encoded(wide), wide),
        sample("zstd with extras", encoded(image), image),
        sample("q8_0", encoded(rounded, rounded=True), rounded),
    ]


SAMPLES = make_samples()


def head_of(data: bytes) -> tuple[pb.BlockHeader, int]:
    """Header and payload offset of a valid file."""
    header_bytes, payload_offset = struct.unpack_from("<IQ", data, 12)
    text = data[PREAMBLE_BYTES : PREAMBLE_BYTES + header_bytes]
    return pb.BlockHeader.FromString(text), payload_offset


def mutate(rng: random.Random, one: Sample) -> Mutant:
    return rng.choices(MUTATIONS, WEIGHTS)[0](rng, one)


# --- damage: no checksum is made right again ------------------------------------------------------


def flip(rng: random.Random, one: Sample) -> Mutant:
    data = bytearray(one.data)
    for _ in range(rng.choice((1, 1, 1, 2, 8, 100))):
        at = rng.randrange(len(data)) if rng.random() < 0.6 else rng.randrange(600)
        data[at] ^= 1 << rng.randrange(8)
    return Mutant(one, bytes(data), "flips")


def overwrite(rng: random.Random, one: Sample) -> Mutant:
    data = bytearray(one.data)
    at = rng.randrange(len(data)) if rng.random() < 0.5 else rng.randrange(600)
    length = min(rng.choice((1, 4, 8, 64, 4096)), len(data) - at)
    filling = rng.choice((bytes(length), b"\xff" * length, rng.randbytes(length)))
    data[at : at + length] = filling
    return Mutant(one, bytes(data), "bytes overwritten")


def cut(rng: random.Random, one: Sample) -> Mutant:
    length = rng.choice((rng.randrange(len(one.data)), rng.randrange(600)))
    if rng.random() < 0.3:
        length -= length % ALIGNMENT
    return Mutant(one, one.data[:length], "truncated")


def extend(rng: random.Random, one: Sample) -> Mutant:
    length = rng.choice((1, 32, 4095, 4096, 8192, rng.randrange(1, 20000)))
    more = rng.choice((bytes(length), rng.randbytes(length)))
    return Mutant(one, one.data + more, "extended")


def splice(rng: random.Random, one: Sample) -> Mutant:
    other = rng.choice(SAMPLES)
    at = rng.choice((32, ALIGNMENT, rng.randrange(len(one.data))))
    if rng.random() < 0.5:
        return Mutant(one, one.data[:at] + other.data[at:], "spliced")
    start = rng.randrange(len(other.data))
    piece = other.data[start : start + rng.choice((4, 32, 4096))]
    data = one.data[:at] + piece + one.data[at + len(piece) :]
    return Mutant(one, data, "a piece of another")


def preamble(rng: random.Random, one: Sample) -> Mutant:
    """Each field of the preamble, with or without its checksum."""
    fields = list(struct.unpack_from("<8sIIQI", one.data))
    at = rng.randrange(1, 5)
    limit = 1 << (64 if at == 3 else 32)
    fields[at] = (rng.choice(EDGES) if rng.random() < 0.8 else rng.getrandbits(64)) % limit
    head = struct.pack("<8sIIQI", *fields)
    trusted = rng.random() < 0.8
    head += struct.pack("<I", crc32c(head)) if trusted else one.data[28:32]
    return Mutant(one, head + one.data[32:], "preamble", trusted)


# --- malice: the checksums are right --------------------------------------------------------------


def trusted_head(rng: random.Random, one: Sample, header: pb.BlockHeader) -> bytes:
    """The file with this header. Its segments keep their bytes as far as those are found."""
    _, payload_offset = head_of(one.data)
    text = header.SerializeToString()
    if PREAMBLE_BYTES + len(text) > payload_offset and rng.random() < 0.9:
        payload_offset = -(-(PREAMBLE_BYTES + len(text)) // ALIGNMENT) * ALIGNMENT
    return pack_head(text, payload_offset) + one.data[head_of(one.data)[1] :]


def header_field(rng: random.Random, one: Sample) -> Mutant:
    """One to three fields of the header or its parts, then all checksums again."""
    header, _ = head_of(one.data)
    for _ in range(rng.choice((1, 1, 1, 2, 3))):
        target: Message = header
        if rng.random() < 0.6 and header.segments:
            target = rng.choice(header.segments)
        change_field(rng, target)
    if rng.random() < 0.5:  # what names the block is made to fit, so that it gets further
        extras = [BlockExtra(extra.row, extra.digest) for extra in header.extras]
        header.key = block_key(header.parent, header.tokens, extras)
    if rng.random() < 0.3:
        for segment in header.segments:
            if segment.encoding == pb.ENCODING_ZSTD and rng.random() < 0.5:
                segment.stored_bytes = min(sum(segment.plane_bytes), (1 << 64) - 1)
    data = trusted_head(rng, one, header)
    return Mutant(one, resummed(data, header) if rng.random() < 0.5 else data, "header", True)


def resummed(data: bytes, header: pb.BlockHeader) -> bytes:
    """With the checksums of whatever bytes the segments name, and the file as long as it says."""
    payload_offset = int.from_bytes(data[16:24], "little")
    end = 0
    for segment in header.segments:
        start = payload_offset + segment.offset
        if segment.stored_bytes <= 1 << 20 and start < 1 << 30:
            segment.crc32c = crc32c(data[start : start + segment.stored_bytes])
        end = max(end, segment.offset + segment.stored_bytes)
    text = header.SerializeToString()
    if PREAMBLE_BYTES + len(text) > payload_offset:
        return data
    data = pack_head(text, payload_offset) + data[payload_offset:]
    length = -(-(payload_offset + end) // ALIGNMENT) * ALIGNMENT
    return data[:length].ljust(length, b"\0") if length < 1 << 20 else data


def change_field(rng: random.Random, message: Message) -> None:
    field: FieldDescriptor = rng.choice(message.DESCRIPTOR.fields)
    if field.is_repeated:
        values = getattr(message, field.name)
        action = rng.randrange(4)
        if action == 0 and len(values):
            del values[rng.randrange(len(values))]
        elif field.message_type is not None:
            if action == 1 and len(values):
                values.append(values[rng.randrange(len(values))])
            elif action == 2 and len(values) > 1:
                order = list(values)
                rng.shuffle(order)
                del values[:]
                values.extend(order)
            elif len(values):
                change_field(rng, values[rng.randrange(len(values))])
            else:
                change_field(rng, values.add())
            if rng.random() < 0.02:
                for _ in range(5000):
                    values.add()
        else:
            values.append(scalar(rng, field))
        return
    if field.message_type is not None:
        change_field(rng, getattr(message, field.name))
    elif rng.random() < 0.1:
        message.ClearField(field.name)
    else:
        old = getattr(message, field.name)
        value = scalar(rng, field)
        if isinstance(old, int) and rng.random() < 0.4:
            value = in_range(field, old + rng.choice((-4096, -2, -1, 1, 2, 4096)))
        elif isinstance(old, bytes) and old and rng.random() < 0.6:
            at = rng.randrange(len(old))
            value = rng.choice((old[:at], old + old[:at], flipped(rng, old)))
        setattr(message, field.name, value)


def flipped(rng: random.Random, data: bytes) -> bytes:
    out = bytearray(data)
    out[rng.randrange(len(out))] ^= 1 << rng.randrange(8)
    return bytes(out)


_BITS = {
    FieldDescriptor.TYPE_INT32: (31, True),
    FieldDescriptor.TYPE_INT64: (63, True),
    FieldDescriptor.TYPE_UINT32: (32, False),
    FieldDescriptor.TYPE_UINT64: (64, False),
    FieldDescriptor.TYPE_FIXED32: (32, False),
    FieldDescriptor.TYPE_FIXED64: (64, False),
    FieldDescriptor.TYPE_ENUM: (31, True),
}
FLOATS = (0.0, -0.0, 1.0, -1.0, 1e-320, 1e308, -1e308, float("inf"), float("-inf"), float("nan"))
TEXTS = ("", "f16", "f32", "bf16", "q8_0", "\0", "../../x", "/etc/passwd", "é" * 40, "x" * 5000)


def in_range(field: FieldDescriptor, value: int) -> int:
    bits, signed = _BITS[field.type]
    return max(-(1 << bits) if signed else 0, min(value, (1 << bits) - 1))


def scalar(rng: random.Random, field: FieldDescriptor) -> int | float | bool | str | bytes:
    """Boundaries of the field's type, what other parts could trip over, or chance."""
    if field.type in _BITS:
        bits = _BITS[field.type][0]
        value = rng.choice((rng.choice(EDGES), rng.getrandbits(rng.randrange(1, bits + 1))))
        return in_range(field, value)
    if field.type == FieldDescriptor.TYPE_BOOL:
        return rng.random() < 0.5
    if field.type in (FieldDescriptor.TYPE_DOUBLE, FieldDescriptor.TYPE_FLOAT):
        return rng.choice((*FLOATS, rng.uniform(-1e6, 1e6)))
    if field.type == FieldDescriptor.TYPE_STRING:
        return rng.choice((*TEXTS, rng.randbytes(rng.randrange(40)).decode("latin-1")))
    assert field.type == FieldDescriptor.TYPE_BYTES, field.full_name
    length = rng.choice((0, 1, 3, 4, 31, 32, 32, 32, 33, 64, 1000, 4 * 4096, 4 * 4097))
    return rng.choice((bytes(length), rng.randbytes(length)))


def header_bytes(rng: random.Random, one: Sample) -> Mutant:
    """The header's wire format, with right checksums: what protobuf makes of it."""
    header, payload_offset = head_of(one.data)
    text = bytearray(header.SerializeToString())
    for _ in range(rng.choice((1, 2, 5))):
        at = rng.randrange(len(text))
        if rng.random() < 0.7:
            text[at] ^= 1 << rng.randrange(8)
        else:
            text[at:at] = rng.randbytes(rng.randrange(1, 12))
    try:
        header = pb.BlockHeader.FromString(bytes(text))
    except DecodeError:
        return Mutant(
            one, pack_head(bytes(text), payload_offset) + one.data[payload_offset:], "wire", True
        )
    return Mutant(one, trusted_head(rng, one, header), "wire", True)


def bomb(rng: random.Random, one: Sample) -> Mutant:
    """Frames that decode to far more than they take, or say so, or lie about it."""
    size = rng.choice(
        (1 << 20, 1 << 22, MAX_DECODED_BYTES // 2, MAX_DECODED_BYTES, 1 << 28, 1 << 31)
    )
    size = size if rng.random() < 0.05 else 1 << rng.randrange(13, 20)
    row_bytes = size // ROWS
    frame = _bomb_frame(min(size // 2, MAX_DECODED_BYTES))
    if rng.random() < 0.4:  # a frame without its size, or with another
        compressor = zstandard.ZstdCompressor(write_content_size=rng.random() < 0.5)
        frame = compressor.compress(bytes(min(size, 1 << 20) // 2 + rng.choice((-1, 0, 1))))
    if rng.random() < 0.3:
        frame = flipped(rng, frame)
    if rng.random() < 0.2:
        frame = frame[: rng.randrange(len(frame))] or b"\0"
    header, _ = head_of(one.data)
    first = header.segments[0]
    planes = [frame] * rng.choice((1, 2, 2, 2, 2, 3))
    stored = b"".join(planes)
    del header.segments[:]
    header.segments.add(
        kind=first.kind,
        encoding=pb.ENCODING_ZSTD,
        dtype=rng.choice(("f16", "f16", "f16", "f32", "")),
        row_bytes=min(row_bytes, (1 << 32) - 1),
        stored_bytes=len(stored),
        crc32c=crc32c(stored),
        raw_crc32c=_zero_crc(min(size, 1 << 22)),
        plane_bytes=[len(plane) for plane in planes],
    )
    header.raw_payload_offset = rng.choice((4096, 4096, 8192, 1 << 21))
    text = header.SerializeToString()
    payload_offset = -(-(PREAMBLE_BYTES + len(text)) // ALIGNMENT) * ALIGNMENT
    padded = stored.ljust(-(-len(stored) // ALIGNMENT) * ALIGNMENT, b"\0")
    return Mutant(one, pack_head(text, payload_offset) + padded, "bomb", True)


@functools.cache
def _bomb_frame(plane_bytes: int) -> bytes:
    return zstandard.ZstdCompressor().compress(bytes(plane_bytes))


@functools.cache
def _zero_crc(length: int) -> int:
    return crc32c(bytes(length))


def noise(rng: random.Random, one: Sample) -> Mutant:
    data = rng.randbytes(rng.choice((0, 1, 31, 32, 33, 4096, 12288)))
    return Mutant(one, (one.data[: rng.randrange(33)] + data)[: len(data)], "noise")


MUTATIONS: tuple[Callable[[random.Random, Sample], Mutant], ...] = (
    *(flip, overwrite, cut, extend, splice),
    *(preamble, header_field, header_bytes, bomb, noise),
)
WEIGHTS = (15, 8, 5, 4, 8, 8, 35, 10, 4, 3)
