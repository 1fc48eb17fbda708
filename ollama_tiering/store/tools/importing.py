"""Takes a chain out of an archive into a store. It trusts nothing in the archive.

`check_archive` reads all of it: every header, key, checksum and link of the chain. It checks that
every window block hangs on a block of the chain, in its place, and that the blocks which it names
are there. Only if all is right does `import_blocks` offer the blocks to a writer, which checks them
again. So what is stored is what was checked, even if the file changes in between.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Final, Protocol

from ollama_tiering.config import count
from ollama_tiering.store.block.blockfile import BlockMeta, ReadAt, read_meta, verify_payload
from ollama_tiering.store.block.key import TOKEN_BYTES, BlockKey
from ollama_tiering.store.block.window_fields import has_window_extra
from ollama_tiering.store.errors import ArchiveRefused, CorruptBlock, NoRoom
from ollama_tiering.store.serving.session import CommitResult
from ollama_tiering.store.tools.archive import Archive, ArchivedBlock, ArchiveManifest

PART_BYTES: Final = 1 << 20


@dataclass(frozen=True, slots=True)
class CheckedChain:
    manifest: ArchiveManifest
    tokens: bytes  # of the whole chain, int32 little endian
    hangs_on: dict[BlockKey, BlockKey] = field(default_factory=dict)  # of each window block

    @property
    def whole_keys(self) -> list[BlockKey]:
        """The keys that a look-up asks for; a tail block is found by its tokens."""
        count = len(self.tokens) // TOKEN_BYTES // self.manifest.block_tokens
        return [block.key for block in self.manifest.blocks[:count]]


@dataclass(frozen=True, slots=True)
class Present:
    """What is stored of a chain already."""

    blocks: int = 0  # its first ones
    windows: frozenset[BlockKey] = frozenset()

    def missing(self, manifest: ArchiveManifest) -> list[ArchivedBlock]:
        """Lists them in the order in which they can be stored."""
        windows = [block for block in manifest.windows if block.key not in self.windows]
        return [*manifest.blocks[self.blocks :], *windows]


@dataclass(frozen=True, slots=True)
class Imported:
    blocks: int  # of the chain, with its window blocks
    present: int  # were stored already
    stored: int  # are stored now
    file_bytes: int  # of those stored now


class BlockSink(Protocol):
    """Takes blocks: an inline write session, in this process or in a sidecar."""

    def put(self, key: BlockKey, parts: Iterator[tuple[bytes, bool]]) -> CommitResult: ...


def check_archive(archive: Archive, progress: Callable[[int], None]) -> CheckedChain:
    """ArchiveRefused names the first thing that is wrong. OSError passes."""
    manifest = archive.manifest
    tokens = bytearray()
    numbers: dict[bytes, int] = {}
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
        if meta.cells:
            raise ArchiveRefused(f"{block.name} is a window block, and no block of a chain")
        tokens += meta.tokens
        numbers[block.key] = index
        parent = block.key
        progress(block.file_bytes)
    checked = CheckedChain(manifest, bytes(tokens))
    named = {window.key for window in manifest.windows}
    for window in manifest.windows:
        with archive.open(window) as read_at:
            meta = _checked(window, read_at)
        _check_window(window, meta, checked, numbers)
        if not named.issuperset(meta.others):
            raise ArchiveRefused(f"{window.name} is of a window that is not there as a whole")
        checked.hangs_on[window.key] = BlockKey(meta.parent)
        progress(window.file_bytes)
    return checked


def import_blocks(
    archive: Archive, sink: BlockSink, present: Present, progress: Callable[[int], None]
) -> Imported:
    """Stores what is not stored yet. NoRoom if a block is not taken."""
    stored = file_bytes = 0
    missing = present.missing(archive.manifest)
    total = len(archive.manifest.files)
    there = total - len(missing)
    for block in missing:
        with archive.open(block) as read_at:
            result = sink.put(block.key, _parts(block, read_at))
        if not result.stored:
            raise NoRoom(
                f"{there + stored:,} of {count(total, 'block')} stored, the next was refused: "
                f"{result.reason or 'no reason given'}",
                hint="make room (`tiering rm`, `tiering gc`) or raise the budget, then again",
            )
        stored, file_bytes = stored + 1, file_bytes + block.file_bytes
        progress(block.file_bytes)
    return Imported(total, there, stored, file_bytes)


Found = tuple[BlockKey, int, int, Sequence[BlockKey]]  # key, matching rows, rows, window blocks


def what_is_present(checked: CheckedChain, found: Sequence[Found]) -> Present:
    """Made from a look-up of the chain. If every token matched, all blocks are present: the last
    one may be covered by a longer block, and then the window blocks that hung on it are not needed.
    """
    blocks = checked.manifest.blocks
    windows = {key for *_, attached in found for key in attached}
    if sum(rows for _, rows, *_ in found) * TOKEN_BYTES < len(checked.tokens):
        pairs = zip(blocks, found, strict=False)
        count = sum(block.key == key and rows == whole for block, (key, rows, whole, _) in pairs)
        return Present(count, frozenset(windows))
    last = blocks[-1].key
    if found[-1][0] != last:
        windows |= {key for key, on in checked.hangs_on.items() if on == last}
    return Present(len(blocks), frozenset(windows))


def _check_window(
    window: ArchivedBlock, meta: BlockMeta, checked: CheckedChain, numbers: dict[bytes, int]
) -> None:
    """`numbers` gives the number of each block of the chain."""
    block_tokens = checked.manifest.block_tokens
    number = numbers.get(meta.parent)
    if meta.namespace != checked.manifest.namespace:
        raise ArchiveRefused(f"{window.name} is of another namespace")
    if not meta.cells or not has_window_extra(meta.extras):
        raise ArchiveRefused(f"{window.name} is no window block")
    if number is None:
        raise ArchiveRefused(f"{window.name} hangs on no block of this chain")
    if meta.first_position != (number + 1) * block_tokens:
        raise ArchiveRefused(f"{window.name} is not in its block's place")
    step = block_tokens * TOKEN_BYTES
    own = checked.tokens[number * step : (number + 1) * step]
    starts = range(0, len(own) - len(meta.tokens) + 1, TOKEN_BYTES)
    if not any(own.startswith(meta.tokens, start) for start in starts):
        raise ArchiveRefused(f"{window.name} has other tokens than the block it hangs on")


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
