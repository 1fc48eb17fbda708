"""A tier of another sort than those of the store, to show what one more takes: a drawer of this
machine's that no client can open, as an object store or a box of tapes would be.
"""

from __future__ import annotations

import contextlib
import errno
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from ollama_tiering.store.block.blockfile import buffer_reader
from ollama_tiering.store.block.key import BlockKey, NamespaceId
from ollama_tiering.store.tiers.contract import (
    FirstGuess,
    StoredBlock,
    TempBlock,
    Tier,
    TierKind,
)

Place = tuple[NamespaceId, BlockKey]

_GUESS: Final = FirstGuess(bytes_per_second=10e6, seconds_per_block=1e-3)


class ToyBlock:
    def __init__(self, data: bytearray) -> None:
        self.file_bytes = len(data)
        self.read_at = buffer_reader(data)

    def read_into(self, offset: int, buffer: memoryview) -> None:
        buffer[:] = self.read_at(offset, buffer.nbytes)

    def resident(self) -> bool | None:
        return None


@dataclass(slots=True)
class ToyTemp:
    namespace: NamespaceId
    key: BlockKey
    data: bytearray
    file_bytes: int
    path: Path | None = None
    grown_bytes: int = 0

    def write_at(self, offset: int, data: Any) -> None:
        view = memoryview(data).cast("B")
        self.data[offset : offset + view.nbytes] = view

    @contextlib.contextmanager
    def writer(self, *, pages: bool = False) -> Iterator[Any]:
        yield self.write_at

    @contextlib.contextmanager
    def open(self) -> Iterator[ToyBlock]:
        yield ToyBlock(self.data)


@dataclass(slots=True)
class ToyTier:
    kind: TierKind = TierKind.LOCAL
    directory: Path | None = None
    is_volatile: bool = False
    in_memory: bool = False
    wears_disk: bool = False
    is_shared: bool = False
    announces: bool = False
    clients_open: bool = False
    first_guess: FirstGuess = _GUESS
    growth_bytes: int = 0
    refused_files: int = 0
    capacity_bytes: int = 1 << 40
    kept: dict[Place, bytearray] = field(default_factory=dict)
    bad: dict[Place, bytearray] = field(default_factory=dict)

    def scan(self) -> Iterator[StoredBlock]:
        for (namespace, key), data in list(self.kept.items()):
            yield StoredBlock(namespace, key, len(data), len(data), 0.0)

    def create(self, namespace: NamespaceId, key: BlockKey, file_bytes: int) -> ToyTemp:
        if file_bytes > self.capacity_bytes:
            raise OSError(errno.ENOSPC, "no space left in the drawer")
        return ToyTemp(namespace, key, bytearray(file_bytes), file_bytes)

    def seal(self, temp: TempBlock) -> None:
        pass

    def publish(self, temp: TempBlock, *, durable: bool = True) -> int:
        assert isinstance(temp, ToyTemp)
        self.kept[temp.namespace, temp.key] = temp.data
        return temp.file_bytes

    def sync_names(self) -> None:
        pass

    def sync_removals(self) -> None:
        pass

    def discard(self, temp: TempBlock) -> None:
        pass

    @contextlib.contextmanager
    def open(self, namespace: NamespaceId, key: BlockKey) -> Iterator[ToyBlock]:
        if (namespace, key) not in self.kept:
            raise FileNotFoundError(errno.ENOENT, "not in the drawer", key.hex())
        yield ToyBlock(self.kept[namespace, key])

    peek = open

    def exists(self, namespace: NamespaceId, key: BlockKey, file_bytes: int | None = None) -> bool:
        data = self.kept.get((namespace, key))
        return data is not None and file_bytes in (None, len(data))

    def path(self, namespace: NamespaceId, key: BlockKey) -> str | None:
        return None

    def remove(self, namespace: NamespaceId, key: BlockKey) -> None:
        self.kept.pop((namespace, key), None)

    def quarantine(self, namespace: NamespaceId, key: BlockKey) -> None:
        if (namespace, key) not in self.kept:
            raise FileNotFoundError(errno.ENOENT, "not in the drawer", key.hex())
        self.bad[namespace, key] = self.kept.pop((namespace, key))

    def remove_quarantined(self, namespace: NamespaceId, key: BlockKey) -> None:
        self.bad.pop((namespace, key), None)

    def quarantined_bytes(self) -> int:
        return sum(map(len, self.bad.values()))

    def overhead_bytes(self) -> int:
        return self.quarantined_bytes()

    def measure_overhead(self) -> None:
        pass

    def purge_quarantine(self, keep_blocks: int) -> None:
        for place in list(self.bad)[: max(0, len(self.bad) - keep_blocks)]:
            del self.bad[place]

    def describe(self, namespace: NamespaceId, fields: Sequence[tuple[str, str]]) -> None:
        pass

    def drop_pages(self, namespace: NamespaceId, key: BlockKey) -> None:
        pass

    def close(self) -> None:
        pass


if TYPE_CHECKING:  # mypy says what it lacks of a tier
    _it_is_a_tier: Tier = ToyTier()
