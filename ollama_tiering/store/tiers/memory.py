"""A tier in a dict, for tests of everything above a tier."""

from __future__ import annotations

import contextlib
import errno
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from ollama_tiering.store.block.blockfile import buffer_reader
from ollama_tiering.store.block.key import BlockKey, NamespaceId
from ollama_tiering.store.block.segments import align
from ollama_tiering.store.tiers.contract import StoredBlock, TempBlock, TierKind, WriteAt
from ollama_tiering.store.tiers.kinds import TierOfKind

if TYPE_CHECKING:
    from typing_extensions import Buffer

Place = tuple[NamespaceId, BlockKey]


class MemoryOpenBlock:
    def __init__(self, data: bytes | bytearray) -> None:
        self.file_bytes = len(data)
        self.read_at = buffer_reader(data)

    def read_into(self, offset: int, buffer: memoryview) -> None:
        buffer[:] = self.read_at(offset, buffer.nbytes)

    def resident(self) -> bool | None:
        return True


class MemoryTempBlock:
    path: Path | None = None
    grown_bytes = 0

    def __init__(self, namespace: NamespaceId, key: BlockKey, file_bytes: int) -> None:
        self.namespace = namespace
        self.key = key
        self.file_bytes = file_bytes
        self.data = bytearray(file_bytes)

    def write_at(self, offset: int, data: Buffer) -> None:
        view = memoryview(data).cast("B")
        self.data[offset : offset + view.nbytes] = view

    @contextlib.contextmanager
    def writer(self, *, pages: bool = False) -> Iterator[WriteAt]:
        yield self.write_at

    @contextlib.contextmanager
    def open(self) -> Iterator[MemoryOpenBlock]:
        yield MemoryOpenBlock(self.data)


class MemoryTier(TierOfKind):
    """`capacity_bytes` stands for the size of the disk: a block that does not fit is ENOSPC."""

    refused_files = 0

    def __init__(self, kind: TierKind, *, capacity_bytes: int | None = None) -> None:
        super().__init__(kind)
        self.directory: Path | None = None
        self.in_memory = True
        self.growth_bytes = 0
        self.capacity_bytes = capacity_bytes
        self.blocks: dict[Place, bytes] = {}
        self.writing: dict[int, MemoryTempBlock] = {}
        self.bad: dict[Place, bytes] = {}
        self.described: dict[NamespaceId, dict[str, str]] = {}

    def scan(self) -> Iterator[StoredBlock]:
        self.writing.clear()
        for (namespace, key), data in list(self.blocks.items()):
            yield StoredBlock(namespace, key, len(data), align(len(data)), 0.0)

    def create(self, namespace: NamespaceId, key: BlockKey, file_bytes: int) -> MemoryTempBlock:
        taken = sum(map(len, self.blocks.values())) + sum(map(len, self.bad.values()))
        taken += sum(t.file_bytes for t in self.writing.values())
        if self.capacity_bytes is not None and taken + file_bytes > self.capacity_bytes:
            raise OSError(errno.ENOSPC, "no space left in the memory tier")
        temp = MemoryTempBlock(namespace, key, file_bytes)
        self.writing[id(temp)] = temp
        return temp

    def seal(self, temp: TempBlock) -> None:
        pass

    def sync_names(self) -> None:
        pass

    def sync_removals(self) -> None:
        pass

    def publish(self, temp: TempBlock, *, durable: bool = True) -> int:
        assert isinstance(temp, MemoryTempBlock)
        del self.writing[id(temp)]
        self.blocks[temp.namespace, temp.key] = bytes(temp.data)
        return align(temp.file_bytes)

    def discard(self, temp: TempBlock) -> None:
        self.writing.pop(id(temp), None)

    @contextlib.contextmanager
    def open(self, namespace: NamespaceId, key: BlockKey) -> Iterator[MemoryOpenBlock]:
        try:
            data = self.blocks[namespace, key]
        except KeyError:
            raise FileNotFoundError(errno.ENOENT, "no such block", key.hex()) from None
        yield MemoryOpenBlock(data)

    def exists(self, namespace: NamespaceId, key: BlockKey, file_bytes: int | None = None) -> bool:
        data = self.blocks.get((namespace, key))
        return data is not None and file_bytes in (None, len(data))

    def path(self, namespace: NamespaceId, key: BlockKey) -> str | None:
        return None

    def remove(self, namespace: NamespaceId, key: BlockKey) -> None:
        self.blocks.pop((namespace, key), None)

    def quarantine(self, namespace: NamespaceId, key: BlockKey) -> None:
        try:
            self.bad[namespace, key] = self.blocks.pop((namespace, key))
        except KeyError:
            raise FileNotFoundError(errno.ENOENT, "no such block", key.hex()) from None

    def peek(
        self, namespace: NamespaceId, key: BlockKey
    ) -> contextlib.AbstractContextManager[MemoryOpenBlock]:
        return self.open(namespace, key)

    def remove_quarantined(self, namespace: NamespaceId, key: BlockKey) -> None:
        self.bad.pop((namespace, key), None)

    def quarantined_bytes(self) -> int:
        return sum(align(len(data)) for data in self.bad.values())

    def overhead_bytes(self) -> int:
        return self.quarantined_bytes()

    def measure_overhead(self) -> None:
        pass

    def purge_quarantine(self, keep_blocks: int) -> None:
        for place in list(self.bad)[: max(0, len(self.bad) - keep_blocks)]:
            del self.bad[place]

    def describe(self, namespace: NamespaceId, fields: Sequence[tuple[str, str]]) -> None:
        self.described.setdefault(namespace, dict(fields))

    def drop_pages(self, namespace: NamespaceId, key: BlockKey) -> None:
        pass

    def close(self) -> None:
        self.writing.clear()
