"""What an open file says it is, and whether that is so: asked by whoever judges a copy."""

from __future__ import annotations

from ollama_tiering.store.block.blockfile import BlockMeta, check_place, read_meta, verify_payload
from ollama_tiering.store.block.key import BlockKey, NamespaceId
from ollama_tiering.store.tiers.contract import OpenBlock


def checked_meta(
    block: OpenBlock, namespace: NamespaceId, key: BlockKey, *, payload: bool = False
) -> BlockMeta:
    """The header of what should be this block; `payload`: all of its bytes are checked, too.

    CorruptBlock, UnsupportedFormat; OSError of a disk passes.
    """
    meta = read_meta(block.read_at, block.file_bytes)
    check_place(meta, namespace, key)
    if payload:
        verify_payload(meta, block.read_at)
    return meta
