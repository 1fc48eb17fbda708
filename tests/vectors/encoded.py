"""Block files as the sidecar stores them where no client reads: encoded."""

from __future__ import annotations

import struct

from ollama_tiering.store.block import blockfile
from ollama_tiering.store.block.blockfile import encode_block, pack_head, plan_block
from ollama_tiering.store.block.key import tokens_to_bytes
from ollama_tiering.store.block.pb import block_store_pb2 as pb
from ollama_tiering.store.block.segments import SegmentShape, align
from tests.vectors.building import (
    CREATED,
    Files,
    flipped,
    kv,
    parts,
    reheaded,
    segment,
    segment_bytes,
)
from tests.vectors.keys import namespaces


def zstd_frame(plane: bytes) -> bytes:
    """A zstd frame made by hand, so that no version of the library changes the vectors: one block,
    RLE where all bytes are the same, else stored (RFC 8878, 3.1.1)."""
    same = len(set(plane)) == 1
    block_header = 1 | (2 if same else 0) | len(plane) << 3
    head = struct.pack("<IBI", 0xFD2FB528, 0xA0, len(plane)) + block_header.to_bytes(3, "little")
    return head + (plane[:1] if same else plane)


def q8_0_block() -> tuple[bytes, bytes]:
    """(raw file, the same encoded): K and V as q8_0 blocks of 32 elements."""
    shapes = kv(0, 0, 2048)
    tokens = [9, 8, 7]
    stored, rows = [], []
    for shape in shapes:
        codes = segment_bytes(shape, len(tokens))[: len(tokens) * 1024]
        out = row = b""
        for at in range(0, len(codes), 32):
            scale = (0x2000 + at) % 0x3C00  # any f16 below 1
            (d,) = struct.unpack("<e", struct.pack("<H", scale))
            out += struct.pack("<H", scale) + codes[at : at + 32]
            row += b"".join(
                struct.pack("<e", d * q) for q in struct.unpack("32b", codes[at : at + 32])
            )
        stored.append(out)
        rows.append(row)
    raw = encode_block(plan_of(tokens, shapes), rows)
    header, payload_offset, _ = parts(raw)
    header.raw_payload_offset = payload_offset
    offset = 0
    for part, data in zip(header.segments, stored, strict=True):
        part.encoding = pb.ENCODING_Q8_0
        part.raw_crc32c = part.crc32c
        part.stored_bytes, part.crc32c = len(data), blockfile.crc32c(data)
        part.offset = offset
        offset += len(data)
    serialized = header.SerializeToString(deterministic=True)
    payload = b"".join(stored)
    payload = payload.ljust(align(len(payload)), b"\0")
    return raw, pack_head(serialized, align(32 + len(serialized))) + payload


def plan_of(tokens: list[int], shapes: list[SegmentShape]) -> blockfile.BlockPlan:
    digest = namespaces()["qwen3"].digest()
    return plan_block(
        namespace=digest,
        parent=digest,
        tokens=tokens_to_bytes(tokens),
        first_position=0,
        shapes=shapes,
        created_unix_seconds=CREATED,
    )


def encoded_block() -> tuple[bytes, bytes]:
    """(raw file, the same encoded): K in zstd, V, which would not get smaller, raw."""
    shapes = kv(0, 0, 2048)
    tokens = [9, 8, 7]
    low = segment_bytes(shapes[0], len(tokens))[: len(tokens) * 1024]
    high = b"\x3c" * len(low)
    k = bytes(byte for pair in zip(low, high, strict=True) for byte in pair)
    v = segment_bytes(shapes[1], len(tokens))
    raw = encode_block(plan_of(tokens, shapes), [k, v])
    header, payload_offset, _ = parts(raw)
    frames = [zstd_frame(low), zstd_frame(high)]
    stored = b"".join(frames)
    header.raw_payload_offset = payload_offset
    first, second = header.segments
    first.encoding = pb.ENCODING_ZSTD
    first.raw_crc32c = first.crc32c
    first.stored_bytes, first.crc32c = len(stored), blockfile.crc32c(stored)
    first.plane_bytes[:] = [len(frame) for frame in frames]
    second.offset = align(len(stored))
    serialized = header.SerializeToString(deterministic=True)
    payload = stored.ljust(second.offset, b"\0") + v.ljust(align(len(v)), b"\0")
    return raw, pack_head(serialized, align(32 + len(serialized))) + payload


def files() -> Files:
    _, encoded = encoded_block()
    _, rounded = q8_0_block()

    def move_a_byte(header: pb.BlockHeader) -> None:
        header.segments[0].plane_bytes[0] -= 1
        header.segments[0].plane_bytes[1] += 1

    return {
        "encoded": ("encoded", "K as zstd frames of its byte planes, V raw", encoded),
        "encoded-q8_0": ("encoded", "K and V as q8_0 blocks", rounded),
        "encoded-q8_0-of-half-a-block": (
            "encoded-corrupt",
            "rows of 2050 bytes: not whole blocks of 32 elements",
            reheaded(rounded, segment(0, row_bytes=2050)),
        ),
        "encoded-payload-bit-flipped": (
            "encoded-corrupt",
            "one bit of a frame",
            flipped(encoded, parts(encoded)[1] + 100),
        ),
        "encoded-raw-checksum-wrong": (
            "encoded-corrupt",
            "decodes to other bytes than were encoded",
            reheaded(encoded, segment(0, raw_crc32c=1)),
        ),
        "encoded-decodes-to-too-much": (
            "encoded-corrupt",
            "rows of 4 GiB - 1: nothing may be allocated for them",
            reheaded(encoded, segment(0, row_bytes=(1 << 32) - 1)),
        ),
        "encoded-decodes-to-less": (
            "encoded-corrupt",
            "fewer bytes than are stored",
            reheaded(encoded, segment(0, row_bytes=16)),
        ),
        "encoded-frame-of-another-size": (
            "encoded-corrupt",
            "rows of 2050 bytes, frames for 2048",
            reheaded(encoded, segment(0, row_bytes=2050)),
        ),
        "encoded-planes-cut-elsewhere": (
            "encoded-corrupt",
            "the first frame one byte shorter, the second one longer",
            reheaded(encoded, move_a_byte),
        ),
        "encoded-without-raw-payload-offset": (
            "encoded-corrupt",
            "where the decoded payload begins is not said",
            reheaded(encoded, lambda header: header.ClearField("raw_payload_offset")),
        ),
    }
