"""Takes a chain out of an archive into a store. Trusts nothing in it.

`check_archive` reads all of it: every header, key, checksum and link of the chain. Only when all is
right does `import_blocks` offer the blocks to a writer, which checks them once more: what is stored
is what was checked even if the file changes in between.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Final, Protocol

from ollama_tiering.store.archive import Archive, ArchivedBlock, Manifest
from ollama_tiering.store.blockfile import BlockMeta, ReadAt, read_meta, verify_payload
from ollama_tiering.store.errors import ArchiveRefused, CorruptBlock, NoRoom
from ollama_tiering.store.key import TOKEN_BYTES, BlockKey
from ollama_tiering.store.session import CommitResult

PART_BYTES: Final = 1 << 20


@dataclass(frozen=True, slots=True)
class CheckedChain:
    manifest: Manifest
    tokens: bytes  # of the whole chain, int32 little endian

    @property
    def whole_keys(self) -> list[BlockKey]:
        """What a look-up asks for: a tail block is found by its tokens."""
        count = len(self.tokens) // TOKEN_BYTES // self.manifest.block_tokens
        return [block.key for block in self.manifest.blocks[:count]]


@dataclass(frozen=True, slots=True)
class Imported:
    blocks: int  # of the chain
    present: int  # were stored already
    stored: int  # are stored now
    file_bytes: int  # of those stored now


class BlockSink(Protocol):
    """Where blocks go: an inline write session, here or in a sidecar."""

    def put(self, key: BlockKey, parts: Iterator[tuple[bytes, bool]]) -> CommitResult: ...


def check_archive(archive: Archive, progress: Callable[[int], None]) -> CheckedChain:
    """ArchiveRefused names the first thing that is wrong. OSError passes."""
    manifest = archive.manifest
    tokens = bytearray()
    parent: bytes = manifest.namespace
    for index, block in enumerate(manifest.blocks):
        with archive.open(block) as read_at:
            meta = _checked(block, read_at)
        rows, whole = meta.rows, manifest.block_tokens
        last = index == len(manifest.blocks) - 1
        if meta.namespace != manifest.namespace:
            raise ArchiveRefused(f"{block.name} is of another namespace")
        if meta.parent != parent or meta.first_position != index * whole:
            raise ArchiveRefused(f"{block.name} does not follow the block before it")
        if rows > whole or (rows < whole and not last):
            raise ArchiveRefused(f"{block.name} has {rows} rows, a block here has {whole}")
        tokens += meta.tokens
        parent = block.key
        progress(block.file_bytes)
    return CheckedChain(manifest, bytes(tokens))


def import_blocks(
    archive: Archive, sink: BlockSink, present: int, progress: Callable[[int], None]
) -> Imported:
    """`present` of the first blocks are stored already. NoRoom when one is not taken."""
    stored = file_bytes = 0
    blocks = archive.manifest.blocks
    for block in blocks[present:]:
        with archive.open(block) as read_at:
            result = sink.put(block.key, _parts(block, read_at))
        if not result.stored:
            raise NoRoom(
                f"{present + stored} of {len(blocks)} blocks are stored, the next was refused: "
                f"{result.reason or 'no reason given'}",
                hint="make room (`tiering rm`, `tiering gc`) or raise the budget, then again",
            )
        stored, file_bytes = stored + 1, file_bytes + block.file_bytes
        progress(block.file_bytes)
    return Imported(len(blocks), present, stored, file_bytes)


def count_present(checked: CheckedChain, found: Sequence[tuple[BlockKey, int, int]]) -> int:
    """Blocks of the chain a look-up found: (key, matching rows, rows) each.

    All of them when every token matched: the last block may be covered by a longer one.
    """
    blocks = checked.manifest.blocks
    if sum(rows for _, rows, _ in found) * TOKEN_BYTES == len(checked.tokens):
        return len(blocks)
    pairs = zip(blocks, found, strict=False)
    return sum(block.key == key and rows == whole for block, (key, rows, whole) in pairs)


def _checked(block: ArchivedBlock, read_at: ReadAt) -> BlockMeta:
    try:
        meta = read_meta(read_at, block.file_bytes)
        if meta.key != block.key:
            raise CorruptBlock("it holds another block")
        verify_payload(meta, read_at)
    except CorruptBlock as error:
        raise ArchiveRefused(f"{block.name}: {error.message}") from None
    digest = hashlib.sha256()
    for part, _ in _parts(block, read_at):
        digest.update(part)
    if digest.hexdigest() != block.sha256:
        raise ArchiveRefused(f"{block.name}: its SHA-256 is not what the manifest says")
    return meta


def _parts(block: ArchivedBlock, read_at: ReadAt) -> Iterator[tuple[bytes, bool]]:
    for offset in range(0, block.file_bytes, PART_BYTES):
        length = min(PART_BYTES, block.file_bytes - offset)
        yield read_at(offset, length), offset + length == block.file_bytes
