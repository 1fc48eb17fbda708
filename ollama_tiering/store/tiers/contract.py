"""What a tier must do. The suite in tests/contract runs over every implementation.

A tier moves and names bytes; it decides nothing. Budgets, the LRU order and locks belong to the
store. Calls may block and may come from several threads, but there are never two writers of one
block. An OSError is weather and passes through; the caller judges damage.
"""

from __future__ import annotations

import enum
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple, Protocol

from ollama_tiering.store.block.key import BlockKey, NamespaceId

if TYPE_CHECKING:
    from typing_extensions import Buffer


class TierKind(enum.IntEnum):
    """What a tier is called: by people, in the settings and on the wire, whose numbers these are.
    Nothing else is decided by it: what follows from a tier is asked of the tier.
    """

    RAM = 1
    LOCAL = 2
    REMOTE = 3

    @property
    def label(self) -> str:
        return self.name.lower()


@dataclass(frozen=True, slots=True)
class StoredBlock:
    """A block file that a scan found; nothing inside it was read yet."""

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


class FirstGuess(NamedTuple):
    """How fast a tier is taken to be until something was measured: rather too slow."""

    bytes_per_second: float
    seconds_per_block: float


class WriteAt(Protocol):
    def __call__(self, offset: int, data: Buffer, /) -> None: ...


class OpenBlock(Protocol):
    """A stored block, open for reading. It stays readable if the block is removed."""

    file_bytes: int

    def read_at(self, offset: int, length: int) -> bytes: ...

    def read_into(self, offset: int, buffer: memoryview) -> None:
        """Fills the buffer. OSError if the file ends before that."""
        ...

    def resident(self) -> bool | None:
        """Whether the bytes are in host memory already; None if that is not known."""
        ...


class TempBlock(Protocol):
    """A block that is being written; nobody sees it until it is published."""

    namespace: NamespaceId
    key: BlockKey
    file_bytes: int
    path: Path | None  # where a client on this host may fill it
    grown_bytes: int  # by how much directories grew for it

    def write_at(self, offset: int, data: Buffer) -> None: ...

    def writer(self, *, pages: bool = False) -> AbstractContextManager[WriteAt]:
        """Gives `write_at` for many parts. `pages` promises whole pages of page-aligned memory."""
        ...

    def open(self) -> AbstractContextManager[OpenBlock]: ...


@dataclass(frozen=True, slots=True)
class Neighbour:
    """Another sidecar on a shared tier, as it announced itself."""

    owner: str
    generation: int  # changes whenever it claims anew
    claim_bytes: int  # that it may still write


class Tier(Protocol):
    """Its properties, up to `refused_files`, are all that the store knows of what a tier is."""

    kind: TierKind  # its name; no two tiers of a store have the same

    @property
    def directory(self) -> Path | None:
        """The directory of its files; None if it has none. Then it has no index, and what people
        pin and remove is not written down beside its blocks.
        """
        ...

    @property
    def is_volatile(self) -> bool:
        """Nobody relies on it after a reboot. What lies only here is copied down without waiting
        for the watermark, and a close waits for that. A model's budget does not bound it. Reads of
        it say how fast it is wherever the bytes were, and what clients read here is not timed.
        """
        ...

    @property
    def in_memory(self) -> bool:
        """There is no disk below it: nothing is synced, and what lies here alone is not safe."""
        ...

    @property
    def wears_disk(self) -> bool:
        """It lies on a disk of this machine, which wears out and which others fill, too. Its writes
        are counted by the day and may be refused (admission.py), the count lies in its directory,
        and the disk's floor of free space is kept.
        """
        ...

    @property
    def is_shared(self) -> bool:
        """Other machines use it, too, and may remove what lies here at any time. So no pin is kept
        here, and no list of this machine's lies here. A tombstone remembers what is to be removed
        here, and what this machine does not know is left alone: somebody may be writing it.
        """
        ...

    @property
    def announces(self) -> bool:
        """The store writes here as one of several, within what it has announced, and a call may
        take until a deadline. Then it is a SharedTier, which has a thread of its own. A tool that
        only looks at a shared directory announces nothing.
        """
        ...

    @property
    def clients_open(self) -> bool:
        """Clients on this machine may open its files, to fill and to read them. Else blocks come
        here from the tiers above, and are staged there before a client is told where they are.
        """
        ...

    @property
    def first_guess(self) -> FirstGuess:
        """Its speed as long as none was measured (speed.py)."""
        ...

    @property
    def growth_bytes(self) -> int:
        """What one more block may add to directories, at most."""
        ...

    @property
    def refused_files(self) -> int:
        """How many files it did not use because they are not ours (system/ownership.py)."""
        ...

    def scan(self) -> Iterator[StoredBlock]:
        """Everything that is stored. Removes what an interrupted write left behind. If a block's
        name may not be durable, because its writer may have been killed, the next `sync_names`
        makes it so.
        """
        ...

    def create(self, namespace: NamespaceId, key: BlockKey, file_bytes: int) -> TempBlock:
        """Makes a file of exactly that size, with its space allocated. ENOSPC if there is none."""
        ...

    def seal(self, temp: TempBlock) -> None:
        """Makes the content of a filled block durable. This may be left to
        `publish`. Thread-safe.
        """
        ...

    def publish(self, temp: TempBlock, *, durable: bool = True) -> int:
        """Makes a filled block durable and visible; returns its physical bytes. Unless `durable`, a
        power cut may lose the name until `sync_names`.
        """
        ...

    def sync_names(self) -> None:
        """Makes the names durable that were published since the last call."""
        ...

    def sync_removals(self) -> None:
        """Ensures that what was removed since the last call does not come back
        after a power cut.
        """
        ...

    def discard(self, temp: TempBlock) -> None: ...

    def open(self, namespace: NamespaceId, key: BlockKey) -> AbstractContextManager[OpenBlock]:
        """FileNotFoundError if there is no such block."""
        ...

    def peek(self, namespace: NamespaceId, key: BlockKey) -> AbstractContextManager[OpenBlock]:
        """Works as `open`, but without checking a MAC: to see what a file says it is."""
        ...

    def exists(self, namespace: NamespaceId, key: BlockKey, file_bytes: int | None = None) -> bool:
        """Whether there is a file of the block, of `file_bytes` bytes if these are given."""
        ...

    def path(self, namespace: NamespaceId, key: BlockKey) -> str | None:
        """Says where a client on this host may read it; None if there is no such place."""
        ...

    def remove(self, namespace: NamespaceId, key: BlockKey) -> None:
        """Removing a block that is not there is no error."""
        ...

    def quarantine(self, namespace: NamespaceId, key: BlockKey) -> None:
        """Renames a damaged block, so that it is not used and a person can examine it."""
        ...

    def remove_quarantined(self, namespace: NamespaceId, key: BlockKey) -> None:
        """Removes the quarantined copy of the block; having none is no error."""
        ...

    def quarantined_bytes(self) -> int: ...

    def overhead_bytes(self) -> int:
        """Physical bytes of everything but blocks, as last known. Does not wait for a disk."""
        ...

    def measure_overhead(self) -> None:
        """Measures again what others write into the directory: the index, a lock, a count."""
        ...

    def purge_quarantine(self, keep_blocks: int) -> None:
        """Removes quarantined blocks, the oldest first, until `keep_blocks` are left."""
        ...

    def describe(self, namespace: NamespaceId, fields: Sequence[tuple[str, str]]) -> None:
        """Stores, for people and tools, what the namespace is the digest of."""
        ...

    def drop_pages(self, namespace: NamespaceId, key: BlockKey) -> None:
        """Tells the system that it need not keep a durable block in its page cache."""
        ...

    def close(self) -> None: ...


class SharedTier(Tier, Protocol):
    """A tier that several sidecars use without a lock server (books/shared_books.py)."""

    @property
    def foreign_bytes(self) -> int:
        """Bytes of what the last complete scan saw besides blocks, such as others' unfinished
        writes.
        """
        ...

    @property
    def stalled(self) -> int:
        """Calls that are past their deadline and have not returned yet."""
        ...

    @property
    def caches_names(self) -> bool:
        """Whether changes by others may be seen late, as on a network file system."""
        ...

    def probe(self) -> None:
        """A cheap call that fails as long as the tier does."""
        ...

    def announce(self, generation: int, claim_bytes: int) -> float:
        """Tells the others that this sidecar is alive, and what it claims. Returns the tier's own
        time.
        """
        ...

    def neighbours(self) -> list[Neighbour]:
        """The other sidecars that are alive. An announcement is seen by everybody who calls this
        after it.
        """
        ...

    def touch(self, namespace: NamespaceId, key: BlockKey) -> None:
        """Marks a block as used now, for all sidecars."""
        ...
