"""Blocks that nobody with the key wrote."""

from __future__ import annotations

import os
from hashlib import blake2b
from pathlib import Path

from measure.store import samples
from ollama_tiering.store.block.blockfile import buffer_reader, pack_head, read_meta, verify_buffer
from ollama_tiering.store.block.checksum import crc32c
from ollama_tiering.store.block.pb import block_store_pb2 as pb
from ollama_tiering.store.tiers.authenticity import TRAILER_BYTES, Authenticity

OTHER_KEY = bytes(32)


def path_of(directory: Path, block: samples.SampleBlock) -> Path:
    (path,) = directory.rglob(f"{block.key.hex()}.kvb")
    return path


def overwrite(path: Path, content: bytes) -> None:
    path.unlink()
    path.write_bytes(content)
    path.chmod(0o400)


def forged(block: samples.SampleBlock) -> bytes:
    """The block with other K/V, its header and checksums right."""
    meta = read_meta(buffer_reader(block.data), len(block.data))
    header_bytes = int.from_bytes(block.data[12:16], "little")
    header = pb.BlockHeader.FromString(block.data[32 : 32 + header_bytes])
    content = bytearray(block.data)
    for segment, field in zip(meta.segments, header.segments, strict=True):
        place = slice(segment.file_offset, segment.file_offset + segment.stored_bytes)
        content[place] = bytes(byte ^ 0x55 for byte in content[place])
        field.crc32c = crc32c(content[place])
    head = pack_head(header.SerializeToString(deterministic=True), meta.payload_offset)
    content[: len(head)] = head
    verify_buffer(read_meta(buffer_reader(content), len(content)), content)
    return bytes(content)


def trailer(path: Path) -> bytes:
    return path.read_bytes()[-TRAILER_BYTES:]


def forge_with_trailer_kept(path: Path, block: samples.SampleBlock) -> bytes:
    return forged(block) + trailer(path)


def forge_with_key_id(path: Path, block: samples.SampleBlock) -> bytes:
    """All that can be made without the key."""
    return forged(block) + trailer(path)[:32] + os.urandom(32)


def forge_without_mac(path: Path, block: samples.SampleBlock) -> bytes:
    return forged(block)


def forge_with_another_key(path: Path, block: samples.SampleBlock) -> bytes:
    return forged(block) + Authenticity(OTHER_KEY).trailer(forged(block))


def forge_without_a_key(path: Path, block: samples.SampleBlock) -> bytes:
    digest = blake2b(forged(block), digest_size=32, person=b"kvt-block-file").digest()
    return forged(block) + trailer(path)[:32] + digest


def change_padding(path: Path, block: samples.SampleBlock) -> bytes:
    """Nothing that a checksum covers."""
    content = bytearray(path.read_bytes())
    assert content[4000] == 0
    content[4000] = 1
    return bytes(content)


def forge_with_the_same_checksums(path: Path, block: samples.SampleBlock) -> bytes:
    """Other K/V under an untouched header: a CRC does not see a multiple of its polynomial."""
    content = bytearray(path.read_bytes())
    meta = read_meta(buffer_reader(block.data), len(block.data))
    polynomial = (1 << 32) | 0x1EDC6F41  # CRC-32C, highest power first; bytes go lowest bit first
    for segment in meta.segments:
        for bit in range(33):
            if polynomial >> (32 - bit) & 1:
                content[segment.file_offset + bit // 8] ^= 1 << bit % 8
    forged_block = bytes(content[: len(block.data)])
    assert forged_block[:4096] == block.data[:4096]
    assert forged_block != block.data
    verify_buffer(meta, forged_block)
    return bytes(content)


FORGERIES = (
    forge_with_the_same_checksums,
    forge_with_trailer_kept,
    forge_with_key_id,
    forge_without_mac,
    forge_with_another_key,
    forge_without_a_key,
    change_padding,
)
