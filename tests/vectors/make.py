"""Writes keys.json, blocks.json and blocks/: what pytest and `go test` both read.

python tests/vectors/make.py
"""

from __future__ import annotations

import hashlib
import json
import struct
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from ollama_tiering.store.block import blockfile
from ollama_tiering.store.block.blockfile import SegmentShape, encode_block, pack_head, plan_block
from ollama_tiering.store.block.key import (
    BlockExtra,
    LayerSpec,
    Namespace,
    prefix_chain,
    tail_key,
    tokens_to_bytes,
)
from ollama_tiering.store.block.pb import block_store_pb2 as pb

HERE = Path(__file__).resolve().parent
K, V = pb.SEGMENT_KIND_K, pb.SEGMENT_KIND_V
CREATED = 1_763_700_000
INT32_MAX, INT32_MIN = (1 << 31) - 1, -(1 << 31)


def namespaces() -> dict[str, Namespace]:
    def full(layers: int, heads: int, dim: int) -> list[LayerSpec]:
        return [LayerSpec(0, layer, heads, dim, dim) for layer in range(layers)]

    return {
        "qwen3": Namespace.of(
            model="sha256-" + "a" * 64,
            engine="ollama-go/0.16.3",
            cache_dtype="f16",
            layers=full(2, 8, 128),
            flash_attention=True,
        ),
        **{
            name: Namespace.of(
                model="sha256-" + "a" * 64,
                engine="ollama-go/0.16.3+0123456789abcdef",
                cache_dtype="f16",
                layers=full(2, 8, 128),
                flash_attention=True,
                extra="devices=none;cpu=AVX2,FMA;libc=2.36 fma;rows=hh" + attention,
            )
            for name, attention in (
                ("stock attention", ""),
                ("exact attention", ";attention=exact.2.avx2"),
            )
        },
        "gemma3": Namespace.of(
            model="sha256-" + "b" * 64,
            engine="ollama-go/0.16.3",
            cache_dtype="q8_0",
            layers=[
                LayerSpec(0, 0, 4, 256, 256, "swa", 1024),
                LayerSpec(1, 1, 4, 256, 192),
                LayerSpec(0, 2, 4, 256, 256, "chunked", 8192),
            ],
            adapters=["sha256-" + "c" * 64, "sha256-" + "d" * 64],
            extra="rope=yarn:äöü",
        ),
        "small-blocks": Namespace.of(
            model="m", engine="test/1", cache_dtype="f32", layers=full(1, 1, 4), block_tokens=4
        ),
        "empty": Namespace(model="", engine="", cache_dtype="", layers=""),
    }


def chains() -> Iterator[dict[str, Any]]:
    image = hashlib.sha256(b"image").digest()
    other = hashlib.sha256(b"another image").digest()
    cases: list[tuple[str, str, list[int], list[BlockExtra]]] = [
        ("no tokens", "qwen3", [], []),
        ("one tail row", "qwen3", [7], []),
        ("63 tail rows", "qwen3", list(range(100, 163)), []),
        ("one whole block", "qwen3", list(range(64)), []),
        ("two whole blocks and a tail of 1", "qwen3", list(range(129)), []),
        (
            "three whole blocks and a tail of 63",
            "gemma3",
            [(i * 7919) % 151_936 for i in range(255)],
            [],
        ),
        ("negative and large ids", "small-blocks", [-1, INT32_MIN, INT32_MAX, 0, 262_143, -2], []),
        ("an image in the second block", "qwen3", [1] * 130, [BlockExtra(70, image)]),
        (
            "images at the first and last row of a block and in the tail",
            "small-blocks",
            list(range(11)),
            [
                BlockExtra(0, image),
                BlockExtra(3, other),
                BlockExtra(7, image),
                BlockExtra(10, other),
            ],
        ),
        (
            "two digests at one row",
            "small-blocks",
            [1, 2, 3],
            [BlockExtra(1, image), BlockExtra(1, other)],
        ),
        ("empty namespace values", "empty", list(range(65)), []),
    ]
    for name, namespace_name, tokens, extras in cases:
        namespace = namespaces()[namespace_name]
        data = tokens_to_bytes(tokens)
        step = int(namespace.block_tokens)
        tail = tail_key(namespace.digest(), data, step, extras)
        yield {
            "name": name,
            "namespace": namespace_name,
            "block_tokens": step,
            "tokens": tokens,
            "extras": [{"row": e.row, "digest": e.digest.hex()} for e in extras],
            "keys": [key.hex() for key in prefix_chain(namespace.digest(), data, step, extras)],
            "tail_key": tail.hex() if tail else None,
        }


def keys_document() -> dict[str, Any]:
    return {
        "comment": "Made by tests/vectors/make.py. Rows of extras count from the prompt's start.",
        "namespaces": [
            {
                "name": name,
                "fields": [{"name": field, "value": value} for field, value in namespace.fields()],
                "digest": namespace.digest().hex(),
            }
            for name, namespace in namespaces().items()
        ],
        "chains": list(chains()),
    }


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
    extras: tuple[BlockExtra, ...] = (),
    first_position: int = 0,
    parent: bytes | None = None,
) -> bytes:
    digest = namespaces()[namespace].digest()
    plan = plan_block(
        namespace=digest,
        parent=digest if parent is None else parent,
        tokens=tokens_to_bytes(tokens),
        first_position=first_position,
        shapes=shapes,
        extras=extras,
        created_unix_seconds=CREATED,
    )
    return encode_block(plan, [segment_bytes(shape, len(tokens)) for shape in shapes])


def kv(child: int, layer: int, row_bytes: int = 16) -> list[SegmentShape]:
    return [SegmentShape(child, layer, kind, "f16", row_bytes) for kind in (K, V)]


def flipped(data: bytes, offset: int, bit: int = 0) -> bytes:
    out = bytearray(data)
    out[offset] ^= 1 << bit
    return bytes(out)


def parts(data: bytes) -> tuple[pb.BlockHeader, int, bytes]:
    """Header, payload offset and payload of an intact file."""
    header_bytes, payload_offset = struct.unpack_from("<IQ", data, 12)
    header = pb.BlockHeader.FromString(data[32 : 32 + header_bytes])
    return header, payload_offset, data[payload_offset:]


def reheaded(data: bytes, change: Callable[[pb.BlockHeader], object], **head: int) -> bytes:
    """The same payload below a changed header whose checksums are right."""
    header, payload_offset, payload = parts(data)
    change(header)
    serialized = header.SerializeToString(deterministic=True)
    offset = head.pop("payload_offset", max(payload_offset, blockfile.align(32 + len(serialized))))
    return pack_head(serialized, offset, **head) + payload


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
    for segment, data in zip(header.segments, stored, strict=True):
        segment.encoding = pb.ENCODING_Q8_0
        segment.raw_crc32c = segment.crc32c
        segment.stored_bytes, segment.crc32c = len(data), blockfile.crc32c(data)
        segment.offset = offset
        offset += len(data)
    serialized = header.SerializeToString(deterministic=True)
    payload = b"".join(stored)
    payload = payload.ljust(blockfile.align(len(payload)), b"\0")
    return raw, pack_head(serialized, blockfile.align(32 + len(serialized))) + payload


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
    second.offset = blockfile.align(len(stored))
    serialized = header.SerializeToString(deterministic=True)
    payload = stored.ljust(second.offset, b"\0") + v.ljust(blockfile.align(len(v)), b"\0")
    return raw, pack_head(serialized, blockfile.align(32 + len(serialized))) + payload


def pack_preamble(version: int, header_bytes: int, payload_offset: int, header_crc: int) -> bytes:
    preamble = struct.pack(
        "<8sIIQI", blockfile.MAGIC, version, header_bytes, payload_offset, header_crc
    )
    return preamble + struct.pack("<I", blockfile.crc32c(preamble))


def block_files() -> dict[str, tuple[str, str, bytes]]:
    """Name -> (expect, why, content); blocks.json says what the values of `expect` mean."""
    image = hashlib.sha256(b"image").digest()
    first = block(list(range(64)), kv(0, 0))
    parent = bytes.fromhex(parts(first)[0].key.hex())
    small = block([5, 6, 7], kv(0, 0))
    payload_offset = parts(small)[1]

    def set_second_offset(offset: int) -> Callable[[pb.BlockHeader], None]:
        def change(header: pb.BlockHeader) -> None:
            header.segments[1].offset = offset

        return change

    def swap(header: pb.BlockHeader) -> None:
        header.segments[0].kind, header.segments[1].kind = V, K

    _, encoded = encoded_block()

    def first_segment(**values: int) -> Callable[[pb.BlockHeader], None]:
        def change(header: pb.BlockHeader) -> None:
            for name, value in values.items():
                setattr(header.segments[0], name, value)

        return change

    def move_a_byte(header: pb.BlockHeader) -> None:
        header.segments[0].plane_bytes[0] -= 1
        header.segments[0].plane_bytes[1] += 1

    def unknown_encoding(header: pb.BlockHeader) -> None:
        header.segments[0].encoding = 77  # type: ignore[assignment]

    def longer(header: pb.BlockHeader) -> None:
        header.segments[1].stored_bytes += 16

    def many_rows(header: pb.BlockHeader) -> None:
        header.tokens = bytes(4 * 4097)

    header, _, payload = parts(small)
    serialized = header.SerializeToString(deterministic=True)
    return {
        "ok-64-rows": ("ok", "the first block of a sequence", first),
        "ok-second-block": (
            "ok",
            "a whole block with a parent",
            block(list(range(64, 128)), kv(0, 0), parent=parent, first_position=64),
        ),
        "ok-tail-1-row": (
            "ok",
            "a tail block of one row",
            block([INT32_MAX], kv(0, 0), parent=parent, first_position=64),
        ),
        "ok-tail-63-rows": (
            "ok",
            "a tail block of 63 rows, two layers, rows of 100 bytes",
            block(
                [-i for i in range(63)],
                kv(0, 0, 100) + kv(0, 1, 100),
                parent=parent,
                first_position=64,
            ),
        ),
        "ok-two-children": (
            "ok",
            "a wrapper cache: layers of two children",
            block([1, 2], kv(0, 1) + kv(1, 0)),
        ),
        "ok-segment-over-one-page": (
            "ok",
            "segments longer than 4096 bytes",
            block([9, 8, 7], kv(0, 0, 2048)),
        ),
        "ok-extras": (
            "ok",
            "an image at row 1",
            block([1, 0, 3], kv(0, 0), extras=(BlockExtra(1, image),)),
        ),
        "payload-bit-flipped": (
            "corrupt-payload",
            "one bit of the second segment",
            flipped(small, payload_offset + 4096 + 5, 3),
        ),
        "header-bit-flipped": ("corrupt-header", "one bit of the header", flipped(small, 40)),
        "preamble-bit-flipped": (
            "corrupt-header",
            "one bit of the header's length",
            flipped(small, 12, 2),
        ),
        "preamble-crc-flipped": (
            "corrupt-header",
            "one bit of the preamble's checksum",
            flipped(small, 30),
        ),
        "wrong-magic": ("corrupt-header", "another magic", b"NOTABLK\n" + small[8:]),
        "empty": ("corrupt-header", "no bytes", b""),
        "truncated-preamble": ("corrupt-header", "31 bytes", small[:31]),
        "truncated-header": ("corrupt-header", "cut inside the header", small[:100]),
        "truncated-payload": ("corrupt-header", "the last page is missing", small[:-4096]),
        "trailing-page": ("corrupt-header", "one page too many", small + bytes(4096)),
        "unknown-version": (
            "unsupported",
            "format version 2, checksums right",
            pack_head(serialized, payload_offset, version=2) + payload,
        ),
        "unknown-version-bad-checksum": (
            "corrupt-header",
            "version 3 by a flipped bit",
            flipped(small, 8, 1),
        ),
        "unknown-encoding": (
            "unsupported",
            "an encoding not known",
            reheaded(small, unknown_encoding),
        ),
        "encoded": ("encoded", "K as zstd frames of its byte planes, V raw", encoded),
        "encoded-q8_0": ("encoded", "K and V as q8_0 blocks", q8_0_block()[1]),
        "encoded-q8_0-of-half-a-block": (
            "encoded-corrupt",
            "rows of 2050 bytes: not whole blocks of 32 elements",
            reheaded(q8_0_block()[1], first_segment(row_bytes=2050)),
        ),
        "encoded-payload-bit-flipped": (
            "encoded-corrupt",
            "one bit of a frame",
            flipped(encoded, parts(encoded)[1] + 100),
        ),
        "encoded-raw-checksum-wrong": (
            "encoded-corrupt",
            "decodes to other bytes than were encoded",
            reheaded(encoded, first_segment(raw_crc32c=1)),
        ),
        "encoded-decodes-to-too-much": (
            "encoded-corrupt",
            "rows of 4 GiB - 1: nothing may be allocated for them",
            reheaded(encoded, first_segment(row_bytes=(1 << 32) - 1)),
        ),
        "encoded-decodes-to-less": (
            "encoded-corrupt",
            "fewer bytes than are stored",
            reheaded(encoded, first_segment(row_bytes=16)),
        ),
        "encoded-frame-of-another-size": (
            "encoded-corrupt",
            "rows of 2050 bytes, frames for 2048",
            reheaded(encoded, first_segment(row_bytes=2050)),
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
        "segment-outside-file": (
            "corrupt-header",
            "offset past the end",
            reheaded(small, set_second_offset(1 << 30)),
        ),
        "segment-offset-huge": (
            "corrupt-header",
            "offset + length overflows 64 bits",
            reheaded(small, set_second_offset((1 << 64) - 4096)),
        ),
        "segments-overlap": (
            "corrupt-header",
            "two segments at one place",
            reheaded(small, set_second_offset(0)),
        ),
        "segment-unaligned": (
            "corrupt-header",
            "offset 4100",
            reheaded(small, set_second_offset(4100)),
        ),
        "segments-out-of-order": ("corrupt-header", "V before K", reheaded(small, swap)),
        "segment-length-wrong": (
            "corrupt-header",
            "not rows times row bytes",
            reheaded(small, longer),
        ),
        "payload-offset-unaligned": (
            "corrupt-header",
            "payload offset 4097",
            pack_preamble(1, len(serialized), 4097, blockfile.crc32c(serialized)) + small[32:],
        ),
        "payload-offset-inside-header": (
            "corrupt-header",
            "payload offset 0",
            pack_preamble(1, len(serialized), 0, blockfile.crc32c(serialized)) + small[32:],
        ),
        "header-longer-than-allowed": (
            "corrupt-header",
            "header_bytes 4 GiB - 1: nothing may be allocated for it",
            pack_preamble(1, (1 << 32) - 1, 1 << 33, 0) + small[32:],
        ),
        "no-rows": (
            "corrupt-header",
            "no tokens",
            reheaded(small, lambda header: header.ClearField("tokens")),
        ),
        "too-many-rows": ("corrupt-header", "4097 rows", reheaded(small, many_rows)),
        "key-of-other-tokens": (
            "corrupt-header",
            "tokens that do not give the key",
            reheaded(small, lambda header: setattr(header, "tokens", tokens_to_bytes([5, 6, 8]))),
        ),
        "parent-too-short": (
            "corrupt-header",
            "a parent of 31 bytes",
            reheaded(small, lambda header: setattr(header, "parent", header.parent[:31])),
        ),
        "header-no-protobuf": (
            "corrupt-header",
            "bytes that are no BlockHeader, checksums right",
            pack_head(b"\xff" * 40, 4096) + payload,
        ),
    }


def expectation(name: str, expect: str, why: str, content: bytes) -> dict[str, Any]:
    out: dict[str, Any] = {
        "file": f"{name}.kvb",
        "expect": expect,
        "why": why,
        "file_bytes": len(content),
        "sha256": hashlib.sha256(content).hexdigest(),
    }
    if expect == "encoded":
        raw, _ = q8_0_block() if "q8_0" in name else encoded_block()
        out |= {"raw_file_bytes": len(raw), "raw_sha256": hashlib.sha256(raw).hexdigest()}
    if expect in ("ok", "corrupt-payload"):
        header, payload_offset, payload = parts(content)
        out |= {
            "namespace": header.namespace.hex(),
            "key": header.key.hex(),
            "parent": header.parent.hex(),
            "first_position": header.first_position,
            "rows": len(header.tokens) // 4,
            "tokens": [int(t) for (t,) in struct.iter_unpack("<i", header.tokens)],
            "extras": [{"row": e.row, "digest": e.digest.hex()} for e in header.extras],
            "created_unix_seconds": header.created_unix_seconds,
            "payload_offset": payload_offset,
            "segments": [
                {
                    "child": s.child,
                    "layer": s.layer,
                    "kind": pb.SegmentKind.Name(s.kind).removeprefix("SEGMENT_KIND_"),
                    "dtype": s.dtype,
                    "row_bytes": s.row_bytes,
                    "offset": s.offset,
                    "stored_bytes": s.stored_bytes,
                    "crc32c": s.crc32c,
                    "sha256": hashlib.sha256(
                        payload[s.offset : s.offset + s.stored_bytes]
                    ).hexdigest(),
                }
                for s in header.segments
            ],
        }
    return out


def documents() -> dict[Path, bytes]:
    files = block_files()
    blocks = {
        "comment": "Made by tests/vectors/make.py. corrupt-header: damage found before the payload "
        "is read; corrupt-payload: the header is fine, a checksum is not; unsupported: a miss, the "
        "file stays; encoded: decodes to the file of raw_sha256; encoded-corrupt: does not. A "
        "reader that does not decode takes both for unsupported.",
        "blocks": [expectation(name, *entry) for name, entry in files.items()],
    }
    made = {Path("blocks") / f"{name}.kvb": content for name, (_, _, content) in files.items()}
    keys = json.dumps(keys_document(), indent=1, ensure_ascii=False)
    made[Path("keys.json")] = keys.encode() + b"\n"
    made[Path("blocks.json")] = json.dumps(blocks, indent=1).encode() + b"\n"
    return made


if __name__ == "__main__":
    for path, content in documents().items():
        (HERE / path).parent.mkdir(exist_ok=True)
        (HERE / path).write_bytes(content)
        print(path, len(content))
