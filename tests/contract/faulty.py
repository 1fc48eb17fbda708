"""A tier that fails or hangs on demand, on every operation: for what must survive it."""

from __future__ import annotations

import contextlib
import errno
import os
import threading
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from ollama_tiering.store.block.key import BlockKey, NamespaceId
from ollama_tiering.store.tiers.authenticity import Authenticity
from ollama_tiering.store.tiers.contract import (
    Neighbour,
    OpenBlock,
    SharedTier,
    StoredBlock,
    TempBlock,
    WriteAt,
)
from ollama_tiering.store.tiers.kinds import TierOfKind
from ollama_tiering.store.tiers.remote import RemoteTier
from ollama_tiering.store.tiers.shared_directory import SharedFsTier


class Faults:
    """`fail` and `hang` name the operations they are for, or all; `heal` ends them.

    Operations are the names of the tier's methods, and read_at, write_at.
    """

    def __init__(self) -> None:
        self._error: int | None = None
        self._operations: Sequence[str] = ()
        self._let_go = threading.Event()
        self._let_go.set()
        self.calls: list[str] = []

    def fail(self, error: int, *operations: str) -> None:
        self._error, self._operations = error, operations

    def hang(self, *operations: str) -> None:
        self._operations = operations
        self._let_go.clear()

    def heal(self) -> None:
        self._error = None
        self._let_go.set()

    def before(self, operation: str) -> None:
        self.calls.append(operation)
        if self._operations and operation not in self._operations:
            return
        if not self._let_go.is_set():
            self._let_go.wait()  # as long as it takes, as in the kernel
        if self._error is not None:
            raise OSError(self._error, os.strerror(self._error))


class FaultyOpenBlock:
    def __init__(self, block: OpenBlock, faults: Faults) -> None:
        self._block = block
        self._faults = faults
        self.file_bytes = block.file_bytes

    def read_at(self, offset: int, length: int) -> bytes:
        self._faults.before("read_at")
        return self._block.read_at(offset, length)

    def read_into(self, offset: int, buffer: memoryview) -> None:
        self._faults.before("read_at")
        self._block.read_into(offset, buffer)

    def resident(self) -> bool | None:
        return self._block.resident()


class FaultyTempBlock:
    path: Path | None = None
    grown_bytes = 0

    def __init__(self, temp: TempBlock, faults: Faults) -> None:
        self.temp = temp
        self._faults = faults
        self.namespace = temp.namespace
        self.key = temp.key
        self.file_bytes = temp.file_bytes

    def write_at(self, offset: int, data: Any) -> None:
        self._faults.before("write_at")
        self.temp.write_at(offset, data)

    @contextlib.contextmanager
    def writer(self, *, pages: bool = False) -> Iterator[WriteAt]:
        yield self.write_at

    @contextlib.contextmanager
    def open(self) -> Iterator[FaultyOpenBlock]:
        self._faults.before("open")
        with self.temp.open() as block:
            yield FaultyOpenBlock(block, self._faults)


class FaultyTier(TierOfKind):
    """A SharedTier around another one."""

    announces = True
    in_memory = False
    growth_bytes = 0

    def __init__(self, inner: SharedTier, faults: Faults) -> None:
        self.inner = inner
        self.faults = faults
        super().__init__(inner.kind)
        self.directory = inner.directory
        self.stalled = 0

    @property
    def foreign_bytes(self) -> int:
        return self.inner.foreign_bytes

    @property
    def caches_names(self) -> bool:
        return self.inner.caches_names

    def scan(self) -> Iterator[StoredBlock]:
        self.faults.before("scan")
        for stored in self.inner.scan():
            self.faults.before("scan")
            yield stored

    def create(self, namespace: NamespaceId, key: BlockKey, file_bytes: int) -> FaultyTempBlock:
        self.faults.before("create")
        return FaultyTempBlock(self.inner.create(namespace, key, file_bytes), self.faults)

    def seal(self, temp: TempBlock) -> None:
        pass

    def sync_names(self) -> None:
        pass

    def sync_removals(self) -> None:
        pass

    def publish(self, temp: TempBlock, *, durable: bool = True) -> int:
        assert isinstance(temp, FaultyTempBlock)
        self.faults.before("publish")
        return self.inner.publish(temp.temp)

    def discard(self, temp: TempBlock) -> None:
        assert isinstance(temp, FaultyTempBlock)
        self.faults.before("discard")
        self.inner.discard(temp.temp)

    @contextlib.contextmanager
    def open(self, namespace: NamespaceId, key: BlockKey) -> Iterator[FaultyOpenBlock]:
        self.faults.before("open")
        with self.inner.open(namespace, key) as block:
            yield FaultyOpenBlock(block, self.faults)

    peek = open

    def exists(self, namespace: NamespaceId, key: BlockKey, file_bytes: int | None = None) -> bool:
        self.faults.before("exists")
        return self.inner.exists(namespace, key, file_bytes)

    def path(self, namespace: NamespaceId, key: BlockKey) -> str | None:
        return self.inner.path(namespace, key)

    def remove(self, namespace: NamespaceId, key: BlockKey) -> None:
        self.faults.before("remove")
        self.inner.remove(namespace, key)

    def quarantine(self, namespace: NamespaceId, key: BlockKey) -> None:
        self.faults.before("quarantine")
        self.inner.quarantine(namespace, key)

    @property
    def refused_files(self) -> int:
        return self.inner.refused_files

    def remove_quarantined(self, namespace: NamespaceId, key: BlockKey) -> None:
        self.faults.before("remove_quarantined")
        self.inner.remove_quarantined(namespace, key)

    def quarantined_bytes(self) -> int:
        return self.inner.quarantined_bytes()

    def overhead_bytes(self) -> int:
        return self.inner.overhead_bytes()

    def measure_overhead(self) -> None:
        self.inner.measure_overhead()

    def purge_quarantine(self, keep_blocks: int) -> None:
        self.faults.before("purge_quarantine")
        self.inner.purge_quarantine(keep_blocks)

    def describe(self, namespace: NamespaceId, fields: Sequence[tuple[str, str]]) -> None:
        self.faults.before("describe")
        self.inner.describe(namespace, fields)

    def drop_pages(self, namespace: NamespaceId, key: BlockKey) -> None:
        self.faults.before("drop_pages")
        self.inner.drop_pages(namespace, key)

    def probe(self) -> None:
        self.faults.before("probe")
        self.inner.probe()

    def announce(self, generation: int, claim_bytes: int) -> float:
        self.faults.before("announce")
        return self.inner.announce(generation, claim_bytes)

    def neighbours(self) -> list[Neighbour]:
        self.faults.before("neighbours")
        return self.inner.neighbours()

    def touch(self, namespace: NamespaceId, key: BlockKey) -> None:
        self.faults.before("touch")
        self.inner.touch(namespace, key)

    def close(self) -> None:
        self.faults.before("close")
        self.inner.close()


def remote_tier(
    directory: Path,
    faults: Faults,
    *,
    deadline_seconds: float = 10.0,
    max_threads: int = 8,
    authenticity: Authenticity | None = None,
) -> RemoteTier:
    """A remote tier as the sidecar has it, with faults below its deadlines."""
    directory.mkdir(mode=0o700, exist_ok=True)

    def opened() -> SharedTier:
        faults.before("mount")
        return FaultyTier(SharedFsTier(directory), faults)

    return RemoteTier(
        directory,
        opened,
        deadline_seconds=deadline_seconds,
        max_threads=max_threads,
        authenticity=authenticity,
    )


WEATHER = (errno.EIO, errno.ESTALE, errno.EACCES, errno.ENOSPC, errno.ETIMEDOUT)
