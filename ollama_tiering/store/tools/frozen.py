"""Looks at a store's files without changing any: for tools while no sidecar runs.

Opening a store as the sidecar does removes leftovers, quarantines damage, and evicts down to the
budget. A person who asks for a list, or to remove one thing, has asked for none of this.
`FrozenTier` scans like the tier that it wraps, but leaves in place what that scan would remove or
quarantine. `FrozenIndex` reads a database that nobody writes to, and saves nothing. The directory
is locked, so that no sidecar starts meanwhile.
"""

from __future__ import annotations

import contextlib
import errno
import logging
import os
import sqlite3
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Final
from urllib.parse import quote

from ollama_tiering.store.block.key import BlockKey, NamespaceId
from ollama_tiering.store.tiers.authenticity import Authenticity
from ollama_tiering.store.tiers.contract import OpenBlock, StoredBlock, TierKind
from ollama_tiering.store.tiers.directory import FsTier
from ollama_tiering.store.tiers.files import FsTempBlock
from ollama_tiering.store.tiers.walk import What, walk
from ollama_tiering.store.upkeep.index import BlockIndex, IndexRow, refuse_odd_files

log = logging.getLogger(__name__)

ENDLESS_BYTES: Final = 1 << 62  # as a budget: a tool that only looks must not evict


class FrozenTier(FsTier):
    """Nothing is stored, removed or renamed until it is thawed."""

    frozen = True
    changes = False

    def thaw(self) -> None:
        """Makes it behave like any other tier from now on."""
        self.frozen = False

    def scan(self) -> Iterator[StoredBlock]:
        for found in walk(self.directory):
            if found.what is not What.BLOCK or found.namespace is None or found.key is None:
                continue
            try:
                info = os.lstat(self.directory / found.path)
            except FileNotFoundError:
                continue
            yield StoredBlock(
                found.namespace, found.key, info.st_size, found.stored_bytes, info.st_mtime
            )

    def create(self, namespace: NamespaceId, key: BlockKey, file_bytes: int) -> FsTempBlock:
        if self.frozen:
            raise _refusal(key)
        return super().create(namespace, key, file_bytes)

    def remove(self, namespace: NamespaceId, key: BlockKey) -> None:
        if self.frozen:
            raise _refusal(key)
        super().remove(namespace, key)

    def quarantine(self, namespace: NamespaceId, key: BlockKey) -> None:
        """While it is frozen, a damaged block is missing from the books, but its file stays where
        it is.
        """
        if not self.frozen:
            super().quarantine(namespace, key)

    def remove_quarantined(self, namespace: NamespaceId, key: BlockKey) -> None:
        if not self.frozen:
            super().remove_quarantined(namespace, key)

    def purge_quarantine(self, keep_blocks: int) -> None:
        if not self.frozen:
            super().purge_quarantine(keep_blocks)

    def describe(self, namespace: NamespaceId, fields: Sequence[tuple[str, str]]) -> None:
        if not self.frozen:
            super().describe(namespace, fields)


class FrozenRemote(FrozenTier):
    """A directory that sidecars share and go on using: it is not locked, and
    nothing is announced.
    """

    def __init__(self, directory: Path, authenticity: Authenticity) -> None:
        self._authenticity = authenticity
        super().__init__(TierKind.REMOTE, directory, exclusive=False)
        self.clients_open = True  # whoever looks waits for it, as for any other directory

    def scan(self) -> Iterator[StoredBlock]:
        return map(self._authenticity.seen, super().scan())

    @contextlib.contextmanager
    def open(self, namespace: NamespaceId, key: BlockKey) -> Iterator[OpenBlock]:
        with super().open(namespace, key) as block:
            yield self._authenticity.opened(block)

    @contextlib.contextmanager
    def peek(self, namespace: NamespaceId, key: BlockKey) -> Iterator[OpenBlock]:
        with super().open(namespace, key) as block:
            yield self._authenticity.peeked(block)


class FrozenIndex(BlockIndex):
    """An index that is only read: the loader ignores what does not fit the files."""

    def save(self, rows: Iterable[IndexRow], removed: Sequence[BlockKey]) -> bool:
        return True

    def save_speeds(self, speeds: Iterable[tuple[int, float, float]]) -> None:
        pass

    def start_afresh(self) -> None:
        pass

    def _open(self) -> sqlite3.Connection:
        uri = f"file:{quote(os.fsencode(self.path))}?mode=ro&immutable=1"
        with contextlib.suppress(sqlite3.Error):
            refuse_odd_files(self.path)
            connection = sqlite3.connect(uri, uri=True, check_same_thread=False)
            try:
                if self.usable(connection):
                    return connection
            except BaseException:
                connection.close()
                raise
            connection.close()
        return self._connect(None)

    def _unlink(self) -> None:
        pass


def _refusal(key: BlockKey) -> OSError:
    return OSError(errno.EROFS, "the store is only looked at", key.hex())
