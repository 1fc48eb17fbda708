"""What a storage level must do; the suite in tests/contract runs over every implementation.

A tier moves and names bytes; it decides nothing. Budgets, LRU order and locks are the store's.
Calls may block and may come from several threads, never two writers for one block at once. OSError
is weather and passes through; damage is judged by the caller.
"""

from __future__ import annotations

import enum
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Protocol

from ollama_tiering.store.block.key import BlockKey, NamespaceId

if TYPE_CHECKING:
    from typing_extensions import Buffer


class TierKind(enum.IntEnum):
    """Values are those of the protocol's `Tier`."""

    RAM = 1
    LOCAL = 2
    REMOTE = 3

    @property
    def label(self) -> str:
        return self.name.lower()


@dataclass(frozen=True, slots=True)
class StoredBlock:
    """A block file a scan found; nothing inside it was read yet."""

    namespace: NamespaceId
    key: BlockKey
    file_bytes: int
    stored_bytes: int  # physical
    modified: float
    has_mac: bool = True  # or none is asked for; whether it is right is not known


@dataclass(slots=True)
class TierStats:
    """Counters of one tier. Written under the store's lock."""

    evicted_blocks: int = 0
    demoted_blocks: int = 0
    promoted_blocks: int = 0
    expired_blocks: int = 0  # of the evicted and demoted: because of their age
    quarantined_blocks: int = 0
    written_bytes: int = 0
    read_bytes: int = 0
    write_seconds: float = 0.0  # the store waited for what it wrote or made durable
    read_seconds: float = 0.0
    served_blocks: int = 0  # leased to clients, which read them themselves
    served_bytes: int = 0
    failures: dict[str, int] = field(default_factory=dict)  # by errno name


class WriteAt(Protocol):
    def __call__(self, offset: int, data: Buffer, /) -> None: ...


class OpenBlock(Protocol):
    """A stored block, open for reading; stays readable if the block is removed meanwhile."""

    file_bytes: int

    def read_at(self, offset: int, length: int) -> bytes: ...

    def read_into(self, offset: int, buffer: memoryview) -> None:
        """Fills the buffer. OSError when the file ends before."""
        ...

    def resident(self) -> bool | None:
        """Whether its bytes are in host memory already; None when that cannot be told."""
        ...


class TempBlock(Protocol):
    """A block being written: invisible until published."""

    namespace: NamespaceId
    key: BlockKey
    file_bytes: int
    path: Path | None  # where a client on this host may fill it
    grown_bytes: int  # by how much directories grew for it

    def write_at(self, offset: int, data: Buffer) -> None: ...

    def writer(self, *, pages: bool = False) -> AbstractContextManager[WriteAt]:
        """`write_at` for many parts. `pages` promises whole pages of page-aligned memory."""
        ...

    def open(self) -> AbstractContextManager[OpenBlock]: ...


@dataclass(frozen=True, slots=True)
class Neighbour:
    """Another sidecar on a shared tier, as it announced itself."""

    owner: str
    generation: int  # changes whenever it claims anew
    claim_bytes: int  # that it may yet write


class Tier(Protocol):
    kind: TierKind

    @property
    def directory(self) -> Path | None:
        """Where its files are; None when it has none."""
        ...

    in_memory: bool  # no disk below it
    growth_bytes: int  # what one more block may add to directories, at most

    @property
    def refused_files(self) -> int:
        """Distinct files it would not use, for they are not ours (system/ownership.py)."""
        ...

    @property
    def shared(self) -> bool:
        """Other sidecars use it too, and a call may take until a deadline. Then it is a SharedTier,
        and no client is ever given a path of it.
        """
        ...

    def scan(self) -> Iterator[StoredBlock]:
        """Everything stored. Removes what an interrupted write left behind. Names that may not be
        durable, for whoever gave them may have been killed, are so after the next `sync_names`.
        """
        ...

    def create(self, namespace: NamespaceId, key: BlockKey, file_bytes: int) -> TempBlock:
        """A file of exactly that size, its space really taken. ENOSPC when there is none."""
        ...

    def seal(self, temp: TempBlock) -> None:
        """Makes the content of a filled block durable. May be left to `publish`; thread-safe."""
        ...

    def publish(self, temp: TempBlock, *, durable: bool = True) -> int:
        """Makes a filled block durable and visible; its physical bytes. Unless `durable`, the name
        may be lost in a power cut until `sync_names`.
        """
        ...

    def sync_names(self) -> None:
        """Makes the names durable that were published since."""
        ...

    def sync_removals(self) -> None:
        """What was removed since does not come back after a power cut."""
        ...

    def discard(self, temp: TempBlock) -> None: ...

    def open(self, namespace: NamespaceId, key: BlockKey) -> AbstractContextManager[OpenBlock]:
        """FileNotFoundError when it is not there."""
        ...

    def peek(self, namespace: NamespaceId, key: BlockKey) -> AbstractContextManager[OpenBlock]:
        """As `open`, to see what a file says it is: where `open` checks a MAC, this does not."""
        ...

    def exists(self, namespace: NamespaceId, key: BlockKey) -> bool: ...

    def path(self, namespace: NamespaceId, key: BlockKey) -> Path | None:
        """Where a client on this host may read it; None when there is no such place."""
        ...

    def remove(self, namespace: NamespaceId, key: BlockKey) -> None:
        """Removing what is not there is fine."""
        ...

    def quarantine(self, namespace: NamespaceId, key: BlockKey) -> None:
        """Puts a damaged block out of the way, for a person to look at."""
        ...

    def remove_quarantined(self, namespace: NamespaceId, key: BlockKey) -> None:
        """The damaged copy that was put out of the way; none is fine."""
        ...

    def quarantined_bytes(self) -> int: ...

    def overhead_bytes(self) -> int:
        """Physical bytes of everything but blocks, as last known. Does not wait for a disk."""
        ...

    def measure_overhead(self) -> None:
        """Looks again at what others write into the directory: the index, a lock, a count."""
        ...

    def purge_quarantine(self, keep_blocks: int) -> None:
        """Removes the oldest damaged blocks but `keep_blocks`."""
        ...

    def describe(self, namespace: NamespaceId, fields: Sequence[tuple[str, str]]) -> None:
        """Keeps, for people, what the namespace is the digest of."""
        ...

    def settle(self, namespace: NamespaceId, key: BlockKey) -> None:
        """Tells the system that a durable block need not stay in its page cache."""
        ...

    def close(self) -> None: ...


class SharedTier(Tier, Protocol):
    """A tier that several sidecars use without a lock server (books/sharing.py)."""

    @property
    def foreign_bytes(self) -> int:
        """What the last whole scan saw besides blocks: others' unfinished writes and the like."""
        ...

    @property
    def stalled(self) -> int:
        """Calls that ran past their deadline and have not returned yet."""
        ...

    @property
    def caches_names(self) -> bool:
        """What others did may be seen late: a network file system."""
        ...

    def probe(self) -> None:
        """A cheap call that fails while the tier does."""
        ...

    def announce(self, generation: int, claim_bytes: int) -> float:
        """Says to the others that this sidecar lives, and what it claims; the tier's own time."""
        ...

    def neighbours(self) -> list[Neighbour]:
        """The other sidecars that live. An announcement is seen by all who ask after it."""
        ...

    def touch(self, namespace: NamespaceId, key: BlockKey) -> None:
        """Marks a block as used now, for all."""
        ...
