"""Block files that every reader must refuse: damage, and what no writer makes.

Where a reader has one check for something, one of these is wrong in nothing else: its checksums
and its key are right.
"""

from __future__ import annotations

from collections.abc import Callable

from ollama_tiering.store.block import blockfile
from ollama_tiering.store.block.blockfile import pack_head
from ollama_tiering.store.block.key import BlockExtra, tokens_to_bytes
from ollama_tiering.store.block.pb import block_store_pb2 as pb
from tests.vectors.building import (
    IMAGE,
    K,
    V,
    block,
    flipped,
    kv,
    pack_preamble,
    parts,
    reheaded,
    rekeyed,
    segment,
)

Entries = dict[str, tuple[str, bytes]]  # name -> (why, content)

SMALL = block([5, 6, 7], kv(0, 0))
HEADER, PAYLOAD_OFFSET, PAYLOAD = parts(SMALL)
SERIALIZED = HEADER.SerializeToString(deterministic=True)
WHOLE_ROWS = 4096  # bytes: the limit of rows, too


def files() -> dict[str, tuple[str, str, bytes]]:
    """Name -> (expect, why, content), as in blocks.json."""
    damage = _damaged() | _heads() | _identities() | _beside_tokens() | _segments()
    return {
        **{name: ("corrupt-header", why, content) for name, (why, content) in damage.items()},
        "payload-bit-flipped": (
            "corrupt-payload",
            "one bit of the second segment",
            flipped(SMALL, PAYLOAD_OFFSET + 4096 + 5, 3),
        ),
        "unknown-version": (
            "unsupported",
            "format version 2, checksums right",
            pack_head(SERIALIZED, PAYLOAD_OFFSET, version=2) + PAYLOAD,
        ),
        "unknown-encoding": (
            "unsupported",
            "an encoding not known",
            reheaded(SMALL, segment(0, encoding=77)),
        ),
    }


def _damaged() -> Entries:
    return {
        "header-bit-flipped": ("one bit of the header", flipped(SMALL, 40)),
        "preamble-bit-flipped": ("one bit of the header's length", flipped(SMALL, 12, 2)),
        "preamble-crc-flipped": ("one bit of the preamble's checksum", flipped(SMALL, 30)),
        "header-crc-wrong": (
            "another checksum of the header, which the preamble's checksum covers",
            pack_preamble(1, len(SERIALIZED), PAYLOAD_OFFSET, 1) + SMALL[32:],
        ),
        "wrong-magic": ("another magic", b"NOTABLK\n" + SMALL[8:]),
        "other-magic-right-checksum": (
            "another magic, checksums right",
            _remagicked(b"KVTBLK\r\0") + SMALL[32:],
        ),
        "empty": ("no bytes", b""),
        "truncated-preamble": ("31 bytes", SMALL[:31]),
        "truncated-header": ("cut inside the header", SMALL[:100]),
        "truncated-payload": ("the last page is missing", SMALL[:-4096]),
        "trailing-page": ("one page too many", SMALL + bytes(4096)),
        "unknown-version-bad-checksum": ("version 3 by a flipped bit", flipped(SMALL, 8, 1)),
    }


def _remagicked(magic: bytes) -> bytes:
    preamble = magic + SMALL[8:28]
    return preamble + blockfile.crc32c(preamble).to_bytes(4, "little")


def _overlapping() -> bytes:
    """1100 rows, whose tokens reach beyond the payload's offset of 4096; no segment lies there."""
    whole = block(list(range(1100)), kv(0, 0, 1))
    header, _, payload = parts(whole)
    for part in header.segments:
        part.offset += 4096
    return (
        pack_head(header.SerializeToString(deterministic=True), 4096).ljust(8192, b"\0") + payload
    )


def _heads() -> Entries:
    crc = blockfile.crc32c(SERIALIZED)
    no_text = SERIALIZED.replace(b"f16", b"f\xff6")

    def with_payload_at(offset: int) -> bytes:
        return pack_preamble(1, len(SERIALIZED), offset, crc) + SMALL[32:]

    return {
        "payload-offset-unaligned": ("payload offset 4097", with_payload_at(4097)),
        "payload-offset-unaligned-and-right": (
            "payload offset 2048, where the payload is",
            pack_head(SERIALIZED, 2048) + PAYLOAD,
        ),
        "payload-offset-inside-header": ("payload offset 0", with_payload_at(0)),
        "payload-offset-inside-header-all-there": (
            "a header that ends in the payload, between whose segments it lies",
            _overlapping(),
        ),
        "payload-offset-outside-file": ("payload offset 2^40", with_payload_at(1 << 40)),
        "header-longer-than-allowed": (
            "header_bytes 4 GiB - 1: nothing may be allocated for it",
            pack_preamble(1, (1 << 32) - 1, 1 << 33, 0) + SMALL[32:],
        ),
        "header-no-protobuf": (
            "bytes that are no BlockHeader, checksums right",
            pack_head(b"\xff" * 40, 4096) + PAYLOAD,
        ),
        "header-no-protobuf-at-its-end": (
            "a whole BlockHeader and bytes that are no field, checksums right",
            pack_head(SERIALIZED + b"\xff" * 3, PAYLOAD_OFFSET) + PAYLOAD,
        ),
        "dtype-no-utf8": ("a dtype that is no UTF-8", pack_head(no_text, PAYLOAD_OFFSET) + PAYLOAD),
    }


def _identities() -> Entries:
    def shorter(name: str) -> Callable[[pb.BlockHeader], None]:
        return lambda header: setattr(header, name, getattr(header, name)[:31])

    def set_tokens(tokens: bytes) -> Callable[[pb.BlockHeader], None]:
        return lambda header: setattr(header, "tokens", tokens)

    one_byte_rows = block([1], kv(0, 0, 1))
    too_many = rekeyed(set_tokens(bytes(4 * (WHOLE_ROWS + 1))))

    def many_rows(header: pb.BlockHeader) -> None:
        too_many(header)
        for part, offset in zip(header.segments, (0, 2 * 4096), strict=True):
            part.stored_bytes, part.offset = WHOLE_ROWS + 1, offset
            part.crc32c = blockfile.crc32c(bytes(WHOLE_ROWS + 1))

    return {
        "no-rows": ("no tokens", reheaded(SMALL, lambda header: header.ClearField("tokens"))),
        "too-many-rows": ("4097 rows", reheaded(SMALL, set_tokens(bytes(4 * 4097)))),
        "too-many-rows-all-there": (
            "4097 rows of one byte, with their key and their bytes",
            reheaded(one_byte_rows, many_rows, payload=bytes(4 * 4096)),
        ),
        "tokens-cut": (
            "13 bytes of tokens, with their key",
            reheaded(SMALL, rekeyed(set_tokens(tokens_to_bytes([5, 6, 7]) + b"\0"))),
        ),
        "key-of-other-tokens": (
            "tokens that do not give the key",
            reheaded(SMALL, set_tokens(tokens_to_bytes([5, 6, 8]))),
        ),
        "parent-too-short": ("a parent of 31 bytes", reheaded(SMALL, shorter("parent"))),
        "parent-too-short-with-its-key": (
            "a parent of 31 bytes, with the key that follows",
            reheaded(SMALL, rekeyed(shorter("parent"))),
        ),
        "namespace-too-short": ("a namespace of 31 bytes", reheaded(SMALL, shorter("namespace"))),
        "key-too-short": ("a key of 31 bytes", reheaded(SMALL, shorter("key"))),
    }


def _beside_tokens() -> Entries:
    """What a header has beside its tokens: extras, cells, keys of a window's other blocks."""
    shapes = kv(0, 0)

    def window_key(length: int) -> Callable[[pb.BlockHeader], None]:
        return lambda header: header.window.append(bytes(length))

    with_cells = block([1, 2, 3], shapes, cells=[7, 8, 9])
    return {
        "extras-out-of-order": (
            "extras at rows 2 and 1, with the key that follows",
            block([1, 2, 3], shapes, extras=[BlockExtra(2, IMAGE), BlockExtra(1, IMAGE)]),
        ),
        "extra-outside-block": (
            "an extra at row 3 of 3 rows",
            block([1, 2, 3], shapes, extras=[BlockExtra(3, IMAGE)]),
        ),
        "cells-fewer-than-rows": ("2 cells of 3 rows", block([1, 2, 3], shapes, cells=[7, 8])),
        "window-without-cells": (
            "other blocks of a window, and no cells",
            reheaded(SMALL, window_key(32)),
        ),
        "window-key-too-short": (
            "a key of 31 bytes among those of a window",
            reheaded(with_cells, window_key(31)),
        ),
    }


def _segments() -> Entries:
    def swap(header: pb.BlockHeader) -> None:
        header.segments[0].kind, header.segments[1].kind = V, K

    def longer(header: pb.BlockHeader) -> None:
        header.segments[1].stored_bytes += 16

    def first_is_empty(header: pb.BlockHeader) -> None:
        segment(0, row_bytes=0, stored_bytes=0, crc32c=0)(header)
        header.segments[1].offset = 0

    return {
        "no-segments": (
            "a header that ends the file",
            reheaded(SMALL, lambda header: header.ClearField("segments"), payload=b""),
        ),
        "segment-of-no-kind": ("neither K nor V", reheaded(SMALL, segment(0, kind=0))),
        "segment-of-unknown-kind": ("a kind not known", reheaded(SMALL, segment(1, kind=3))),
        "segment-empty": (
            "K has rows of no bytes",
            reheaded(SMALL, first_is_empty, payload=PAYLOAD[4096:]),
        ),
        "segment-twice": ("K, and K again", reheaded(SMALL, segment(1, kind=K))),
        "segments-out-of-order": ("V before K", reheaded(SMALL, swap)),
        "layers-out-of-order": (
            "layer 1 before layer 0",
            reheaded(block([1], kv(0, 1) + kv(1, 0)), _child(0)),
        ),
        "children-out-of-order": (
            "child 3 before child 2",
            reheaded(block([1], kv(1, 0) + kv(2, 1)), _child(3, of=(0, 1))),
        ),
        "segment-outside-file": (
            "offset past the end",
            reheaded(SMALL, segment(1, offset=1 << 30)),
        ),
        "segment-offset-huge": (
            "offset + length overflows 64 bits",
            reheaded(SMALL, segment(1, offset=(1 << 64) - 4096)),
        ),
        "segment-wraps-around": (
            "offset + length is the file's end, modulo 2^64",
            reheaded(
                SMALL, segment(1, offset=(1 << 64) - 4096, row_bytes=4096, stored_bytes=3 * 4096)
            ),
        ),
        "segments-overlap": (
            "two segments at one place, with which the file ends",
            reheaded(
                SMALL,
                segment(1, offset=0, crc32c=HEADER.segments[0].crc32c),
                payload=PAYLOAD[:4096],
            ),
        ),
        "segment-unaligned": ("offset 4100", reheaded(SMALL, segment(1, offset=4100))),
        "segment-length-wrong": ("not rows times row bytes", reheaded(SMALL, longer)),
    }


def _child(child: int, of: tuple[int, ...] = (0, 1, 2, 3)) -> Callable[[pb.BlockHeader], None]:
    """Puts segments into a cache child."""

    def change(header: pb.BlockHeader) -> None:
        for index in of:
            header.segments[index].child = child

    return change
