"""What an export of a chain consists of: its blocks, and the window blocks that hang on them.

Without one of its blocks there is no chain. A window block that is damaged or unavailable is left
out, and so is every window that it belongs to: a machine that lacks a window computes those tokens.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace
from typing import Final

from ollama_tiering.errors import StoreDamaged
from ollama_tiering.store.block.description import Fields
from ollama_tiering.store.block.key import BlockKey, NamespaceId
from ollama_tiering.store.errors import CorruptBlock, UnsupportedFormat
from ollama_tiering.store.tiers.checked import checked_meta
from ollama_tiering.store.tiers.contract import OpenBlock
from ollama_tiering.store.tools.archive import ArchivedBlock, ArchiveManifest
from ollama_tiering.store.values import Listing, window_keys

_NO_SUM: Final = "0" * 64

Files = tuple[tuple[BlockKey, int], ...]  # key and bytes of each


@dataclass(frozen=True, slots=True)
class ChainToExport:
    namespace: NamespaceId
    description: Fields
    blocks: Files  # first to last
    windows: Files = ()  # that hang on them

    @property
    def files(self) -> Files:
        return self.blocks + self.windows

    @property
    def file_bytes(self) -> int:
        return sum(size for _, size in self.files)

    def manifest(self) -> ArchiveManifest:
        """The manifest without checksums."""
        blocks, windows = (
            tuple(ArchivedBlock(key, size, _NO_SUM) for key, size in files)
            for files in (self.blocks, self.windows)
        )
        return ArchiveManifest(self.namespace, self.description, blocks, windows)


@dataclass(frozen=True, slots=True)
class LeftOut:
    """A window block that is not exported."""

    key: BlockKey
    reason: str


Opened = Callable[[ChainToExport], Iterable[AbstractContextManager[OpenBlock]]]  # its `files`


def chain_to_export(listing: Listing) -> ChainToExport:
    """Made from a listing of one chain's blocks. StoreDamaged if one of them is missing."""
    hanging = window_keys(listing.blocks)
    blocks = [line for line in listing.blocks if line.key not in hanging]
    if not blocks or not blocks[-1].complete:
        raise StoreDamaged("the start of this chain is not stored", hint="`tiering gc` removes it")
    namespace = blocks[0].namespace
    description = listing.descriptions.get(namespace, ())
    if not description:
        raise StoreDamaged(
            "nothing says what the namespace of this chain is: namespace.json is missing or "
            "damaged",
            hint="the next conversation with that model writes it anew; until then it stays here",
        )
    windows = [line for line in listing.blocks if line.key in hanging]
    files, more = (
        tuple((line.key, line.file_bytes) for line in lines) for lines in (blocks, windows)
    )
    return ChainToExport(namespace, description, files, more)


def with_whole_windows(
    chain: ChainToExport, opened: Opened, progress: Callable[[int], None]
) -> tuple[ChainToExport, list[LeftOut]]:
    """The chain with those of its window blocks that can be used, and why the others cannot. It
    reads each of them, because an archive begins with their number. `opened` is asked for one block
    at a time, so that an error belongs to that block.
    """
    others: dict[BlockKey, tuple[BlockKey, ...]] = {}
    left: list[LeftOut] = []
    for key, size in chain.windows:
        try:
            for context in opened(replace(chain, blocks=((key, size),), windows=())):
                with context as block:
                    others[key] = _others(chain.namespace, key, size, block)
        except (CorruptBlock, UnsupportedFormat) as error:
            left.append(LeftOut(key, error.message))
        except OSError as error:
            left.append(LeftOut(key, error.strerror or str(error)))
        progress(size)
    whole = {key for key, named in others.items() if others.keys() >= set(named)}
    apart = "another block of its window is not there"
    left += [LeftOut(key, apart) for key in others if key not in whole]
    windows = tuple(window for window in chain.windows if window[0] in whole)
    return replace(chain, windows=windows), left


def _others(
    namespace: NamespaceId, key: BlockKey, size: int, block: OpenBlock
) -> tuple[BlockKey, ...]:
    """The other blocks of a window, as its last block names them. CorruptBlock,
    UnsupportedFormat.
    """
    if block.file_bytes != size:
        raise CorruptBlock(f"block {key.hex()} has another size than the store says")
    return checked_meta(block, namespace, key, payload=True).others
