"""What the store knows of a tier that other sidecars use too: who may write how much, what is gone.

The budget holds without a lock server because nobody writes more than it has claimed aloud:

- A sidecar writes only what its allowance covers. Removing a file gives nothing back: what is free
  is known from the next scan.
- The allowance is claimed in an announcement before it is used: at most what the directory really
  had free, less the neighbours' claims as they were before that scan, divided fairly.
- Where a scan may show a directory as it was a while ago (a network file system), a claim goes on
  covering what was written in that while.
- A claim is void if any neighbour claimed anew from before the scan until after the announcement.
  Of two that claim at once, at least one reads the other's announcement, and withdraws.

Blocks appear and disappear by the hands of others: a scan adopts the ones and forgets the others.
Recency is shared as the files' mtimes.
"""

from __future__ import annotations

from collections import OrderedDict, deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Final

from ollama_tiering.store.block.key import BlockKey, NamespaceId
from ollama_tiering.store.books.lru import ByteLru, Reservation
from ollama_tiering.store.tiers.contract import Neighbour

MAX_TO_DESCRIBE: Final = 256
ALLOWANCE_SECONDS: Final = 300.0  # far less than after which the others take a sidecar for dead

Fields = Sequence[tuple[str, str]]


@dataclass(slots=True)
class SharedBooks:
    """Under the store's lock, as the rest of the level's books."""

    scanned: bool = False  # wholly, at least once: until then nothing may be written
    scanning: bool = False
    neighbours: int = 0
    foreign_bytes: int = 0  # others' unfinished writes, removed files somebody still reads
    allowance_bytes: int = 0
    wanted_bytes: int = 0  # of a block there was no allowance for
    taken_bytes: int = 0  # of the allowance, since the last announcement
    written: deque[tuple[float, int]] = field(default_factory=deque)  # by when, bytes
    granted_at: tuple[float, float] = (0.0, 0.0)  # by the clock, by the wall clock
    # Files that cannot be used here, with size and time when that was found (None: not looked at
    # since): not opened again while they are the same.
    passed_over: dict[BlockKey, tuple[int, float] | None] = field(default_factory=dict)
    # To be removed there; with a time: a person removed it then (upkeep/graveyard.py).
    doomed: OrderedDict[tuple[NamespaceId, BlockKey], float | None] = field(
        default_factory=OrderedDict
    )
    to_describe: dict[NamespaceId, Fields] = field(default_factory=dict)

    def describe(self, namespace: NamespaceId, fields: Fields) -> None:
        """Notes what is written once the tier can be. Only people read it: the oldest are dropped
        first.
        """
        self.to_describe[namespace] = tuple(fields)
        if len(self.to_describe) > MAX_TO_DESCRIBE:
            del self.to_describe[next(iter(self.to_describe))]

    def reserve(
        self, lru: ByteLru[BlockKey], need_bytes: int, now: float, wall_now: float
    ) -> Reservation[BlockKey] | None:
        # The wall clock goes on while the machine sleeps and the others give this sidecar up.
        stale = max(now - self.granted_at[0], wall_now - self.granted_at[1]) > ALLOWANCE_SECONDS
        reservation = None
        if not stale and need_bytes <= self.allowance_bytes:
            reservation = lru.reserve(need_bytes)
        if reservation is None:
            self.wanted_bytes = max(self.wanted_bytes, need_bytes)
        else:
            self.allowance_bytes -= need_bytes
            self.taken_bytes += need_bytes
        return reservation

    def took_less(self, reserved_bytes: int, stored_bytes: int) -> None:
        """The last block took less than was reserved for it: the rest may yet be written."""
        rest = min(reserved_bytes - stored_bytes, self.taken_bytes)
        if rest > 0:
            self.taken_bytes -= rest
            self.allowance_bytes += rest

    def written_bytes(self, now: float, since: float) -> int:
        """What was written and may have become visible after `since`; the rest is forgotten."""
        if self.taken_bytes:
            self.written.append((now, self.taken_bytes))
            self.taken_bytes = 0
        while self.written and self.written[0][0] < since:
            self.written.popleft()
        return sum(written for _, written in self.written)

    def grant(self, allowance_bytes: int, now: float, wall_now: float) -> None:
        self.allowance_bytes = allowance_bytes
        self.granted_at = (now, wall_now)
        if self.wanted_bytes <= allowance_bytes:
            self.wanted_bytes = 0


def fair_share(free_bytes: int, wanted_bytes: int, sidecars: int) -> int:
    """What to claim of the free bytes: an equal part, with one left for a sidecar that may join,
    but at least the block that waits for it.
    """
    if free_bytes <= 0:
        return 0
    return max(free_bytes // (sidecars + 1), wanted_bytes if wanted_bytes <= free_bytes else 0)


def generations(neighbours: Sequence[Neighbour]) -> list[tuple[str, int]]:
    return [(neighbour.owner, neighbour.generation) for neighbour in neighbours]
