"""One tier with its books, what leaves it, and what is counted. Data; the store holds the lock."""

from __future__ import annotations

import threading
from collections import Counter
from dataclasses import dataclass, field
from typing import Final

from ollama_tiering.store.block.key import BlockKey, NamespaceId
from ollama_tiering.store.books.lru import ByteLru, Reservation
from ollama_tiering.store.books.shared_books import SharedBooks
from ollama_tiering.store.books.speed import SpeedMeter
from ollama_tiering.store.tiers.contract import Tier, TierStats
from ollama_tiering.store.tiers.space import FreeSpace

REFUSED: Final = "kept out by a rule"  # a miss: the rules say not to store the model


@dataclass(slots=True)
class Level:
    """One tier with its books."""

    index: int
    tier: Tier
    lru: ByteLru[BlockKey]
    speed: SpeedMeter
    stats: TierStats = field(default_factory=TierStats)
    consecutive_failures: int = 0
    suspended_until: float = 0.0
    leaving_bytes: int = 0  # of evicted copies whose files are not yet unlinked
    raw_bytes: int = 0  # of the blocks it holds, had they been stored raw
    kept_bytes: int = 0  # files that are no usable blocks but stay: unknown format, not unlinkable
    headroom_bytes: int = 0  # kept free for the index to grow
    space: FreeSpace | None = None  # where a free-space floor is kept
    full_until: float = 0.0  # the disk is too full, whatever the budget allows
    surveyed: bool = True  # whether all its files are counted; nothing is written before
    said_not_authentic: bool = False
    shared: SharedBooks | None = None  # of a tier that `announces`
    # Held by a writer from evicting to reserving: what it freed is not another's. Never taken with
    # the store's lock held.
    making_room: threading.Lock = field(default_factory=threading.Lock)
    held_bytes: dict[NamespaceId, int] = field(default_factory=dict)  # physical, of its blocks
    # Written to a disk that wears, and not booked to a day yet.
    unbooked_bytes: Counter[NamespaceId] = field(default_factory=Counter)

    def count(self, namespace: NamespaceId, more_bytes: int) -> None:
        """Blocks of the namespace came, or went if negative: whether a file is there decides."""
        held = self.held_bytes.get(namespace, 0) + more_bytes
        if held:
            self.held_bytes[namespace] = held
        else:
            self.held_bytes.pop(namespace, None)

    def wrote(self, namespace: NamespaceId, stored_bytes: int) -> None:
        """A block is in its place."""
        self.stats.written_bytes += stored_bytes
        if self.tier.wears_disk:
            self.unbooked_bytes[namespace] += stored_bytes

    @property
    def known(self) -> bool:
        """Whether all its files have been looked at."""
        return self.surveyed and (self.shared is None or self.shared.scanned)

    @property
    def physical_bytes(self) -> int:
        overhead_bytes = self.lru.overhead_bytes - self.headroom_bytes
        return self.lru.used_bytes + max(0, overhead_bytes)  # not counted yet just after a start


@dataclass(slots=True)
class Doomed:
    """A copy that is out of the books but whose file still is to be unlinked."""

    level: Level
    namespace: NamespaceId
    key: BlockKey
    reservation: Reservation[BlockKey]
    parent: bytes


@dataclass(slots=True)
class Counters:
    has_calls: int = 0
    asked_tokens: int = 0
    matched_tokens: int = 0
    put_blocks: int = 0
    put_bytes: int = 0
    get_blocks: int = 0
    get_bytes: int = 0
    misses: dict[str, int] = field(default_factory=dict)

    @property
    def hits(self) -> int:
        """Look-ups that found at least one row."""
        misses = self.misses
        return self.has_calls - misses.get("unknown prefix", 0) - misses.get(REFUSED, 0)

    def miss(self, reason: str) -> None:
        self.misses[reason] = self.misses.get(reason, 0) + 1
