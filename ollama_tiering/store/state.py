"""Everything the store's one lock protects. No I/O here: what must be unlinked is handed out.

Methods say "lock held" by being on StoreState at all, except `lock` itself.
"""

from __future__ import annotations

import errno
import logging
import math
import threading
import time
from collections import OrderedDict
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field

from ollama_tiering.store.codec import Codec
from ollama_tiering.store.key import BlockKey, NamespaceId
from ollama_tiering.store.lease import LeaseTable
from ollama_tiering.store.lru import ByteLru, Reservation
from ollama_tiering.store.sharing import SharedBooks
from ollama_tiering.store.speed import SpeedMeter
from ollama_tiering.store.tier import Tier, TierStats
from ollama_tiering.store.tree import BlockRecord, BlockTree

log = logging.getLogger(__name__)

_PROMOTABLE_BLOCKS = 1024
_SUSPEND_SECONDS = (1.0, 2.0, 5.0, 15.0, 30.0, 60.0)


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
    raw_bytes: int = 0  # of the blocks it holds, had they been stored raw
    kept_bytes: int = 0  # files that are no usable blocks but stay: unknown format, not unlinkable
    shared: SharedBooks | None = None  # of a tier that other sidecars use too


@dataclass(slots=True)
class Doomed:
    """A copy that is out of the books but whose file still is to be unlinked."""

    level: Level
    namespace: NamespaceId
    key: BlockKey
    claim: Reservation[BlockKey]


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

    def miss(self, reason: str) -> None:
        self.misses[reason] = self.misses.get(reason, 0) + 1


class StoreState:
    def __init__(
        self,
        tiers: Sequence[tuple[Tier, int]],
        *,
        codec: Codec | None = None,
        clock: Callable[[], float] = time.monotonic,
        wall_clock: Callable[[], float] = time.time,
    ) -> None:
        self.lock = threading.Lock()
        self.codec = codec or Codec()
        self.clock = clock
        self.wall_clock = wall_clock
        self.tree = BlockTree()
        self.levels = [
            Level(
                index,
                tier,
                ByteLru(budget),
                SpeedMeter(tier.kind),
                shared=SharedBooks() if tier.shared else None,
            )
            for index, (tier, budget) in enumerate(tiers)
        ]
        self.leases = LeaseTable()
        self.counters = Counters()
        self.writing: set[BlockKey] = set()  # reserved, not committed
        self.leaving: set[BlockKey] = set()  # out of the books, file not yet unlinked
        self.unsaved: OrderedDict[BlockKey, None] = OrderedDict()  # to be written down a level
        self.promotable: OrderedDict[BlockKey, None] = OrderedDict()
        self.staging: dict[BlockKey, threading.Event] = {}  # being copied for a client now
        self.to_sample: list[BlockKey] = []  # read a little of each, to time their tier
        self.index_changed: set[BlockKey] = set()
        self.work = threading.Event()  # something for the background

    # --- books ---------------------------------------------------------------------------------

    def add_copy(self, record: BlockRecord, level: Level, stored_bytes: int) -> BlockRecord:
        """Records that `level` holds the block; returns the record that now stands for it."""
        known = self.tree.get(record.key)
        if known is None:
            self.tree.add(record)
            known = record
        if record is not known:
            known.encoded.pop(level.index, None)
            known.encoded.update(record.encoded)
        if level.index not in known.levels:
            level.raw_bytes += known.file_bytes
        known.levels.add(level.index)
        level.lru.add(record.key, stored_bytes)
        self.index_changed.add(record.key)
        return known

    def drop_copy(self, level: Level, key: BlockKey) -> Doomed | None:
        """Takes one copy out of the books; the caller unlinks its file and calls `gone`."""
        record = self.tree.get(key)
        if record is None or level.index not in record.levels:
            return None
        record.levels.discard(level.index)
        record.encoded.pop(level.index, None)
        level.raw_bytes -= record.file_bytes
        doomed = Doomed(level, record.namespace, key, level.lru.retire(key))
        if not record.levels:
            self._forget(record)
            self.leaving.add(key)
        elif level.index == 0:
            self.unsaved.pop(key, None)
        self.index_changed.add(key)
        return doomed

    def gone(self, doomed: Doomed, *, unlinked: bool) -> None:
        doomed.claim.release()
        if not unlinked:  # the file is still there: its bytes stay counted until the next start
            doomed.level.kept_bytes += doomed.claim.reserved_bytes
            self.count_overhead(doomed.level)
        self.leaving.discard(doomed.key)

    def count_overhead(self, level: Level) -> None:
        """To be called whenever files that are no blocks came or went."""
        level.lru.overhead_bytes = level.kept_bytes + level.tier.quarantined_bytes()
        if level.shared is not None:
            level.lru.overhead_bytes += level.shared.foreign_bytes

    def forget_copy(self, level: Level, key: BlockKey) -> None:
        """The file of a copy is gone already."""
        doomed = self.drop_copy(level, key)
        if doomed:
            self.gone(doomed, unlinked=True)

    def correct_size(
        self, record: BlockRecord, level: Level, file_bytes: int, raw_file_bytes: int
    ) -> None:
        """The header of a file says another size than the books: the file is right."""
        for index in record.levels:
            self.levels[index].raw_bytes += raw_file_bytes - record.file_bytes
        record.file_bytes = raw_file_bytes
        record.encoded.pop(level.index, None)
        if file_bytes < raw_file_bytes:
            record.encoded[level.index] = file_bytes
        self.index_changed.add(record.key)

    def _forget(self, record: BlockRecord) -> None:
        self.tree.discard(record.key)
        self.unsaved.pop(record.key, None)
        self.promotable.pop(record.key, None)

    # --- use -----------------------------------------------------------------------------------

    def pin(self, key: BlockKey) -> None:
        for level in self.levels:
            level.lru.pin(key)

    def unpin(self, key: BlockKey) -> None:
        for level in self.levels:
            level.lru.unpin(key)

    def pinned(self, key: BlockKey) -> bool:
        return self.levels[0].lru.pinned(key)

    def touch(self, leaf_to_root: Iterable[BlockRecord]) -> None:
        """Marks as used, the leaf first: so it is also the first of them to be evicted."""
        now = self.wall_clock()
        levels = self.levels
        for record in leaf_to_root:
            record.last_use = now
            self.index_changed.add(record.key)
            for index in record.levels:
                levels[index].lru.touch(record.key)

    def speeds(self) -> list[tuple[float, float]]:
        """(seconds per block, seconds per byte) of every level, for `nearest`."""
        return [level.speed.expectation() for level in self.levels]

    def nearest(
        self,
        record: BlockRecord,
        speeds: Sequence[tuple[float, float]],
        resting: Sequence[int] = (),
    ) -> tuple[int, float]:
        """Index of the level whose copy is there soonest, decoded, and the seconds that takes."""
        best, least = -1, math.inf
        for index in (0,) if 0 in record.levels else record.levels:
            if index not in resting:
                seconds = self._seconds_from(record, index, speeds)
                if seconds < least:
                    best, least = index, seconds
        return best, least

    def soonest_first(self, record: BlockRecord) -> list[int]:
        """Indices of the levels the block can be had from now."""
        speeds, resting = self.speeds(), self.resting()
        reached = [index for index in record.levels if index not in resting]
        return sorted(reached, key=lambda index: self._seconds_from(record, index, speeds))

    def _seconds_from(
        self, record: BlockRecord, index: int, speeds: Sequence[tuple[float, float]]
    ) -> float:
        per_block, per_byte = speeds[index]
        seconds = per_block + record.bytes_at(index) * per_byte
        if index in record.encoded:
            seconds += self.codec.decode_seconds(record.file_bytes)
        return seconds

    def expire(self) -> None:
        self.end_use(self.leases.expire(self.clock()))

    def end_use(self, keys: Iterable[BlockKey]) -> None:
        """What was leased and read is unpinned, and worth having in the fastest tier.

        Not sooner: a promotion while the client reads would compete with it for the disk.
        """
        for key in keys:
            self.unpin(key)
            record = self.tree.get(key)
            if record is None or 0 in record.levels or len(self.levels) == 1:
                continue
            if len(self.promotable) < _PROMOTABLE_BLOCKS:
                self.promotable[key] = None
        if self.promotable:
            self.work.set()

    # --- eviction ------------------------------------------------------------------------------

    def take_victims(self, level: Level, need_bytes: int, *, partial: bool = False) -> list[Doomed]:
        """Least recently used copies that free `need_bytes`; none if that cannot be reached, or as
        many as possible with `partial`.

        A chain has no holes: the last copy of a block goes only after all of its children. A block
        not yet written down a level stays, unless that level is failing.
        """
        self.expire()
        below = self.below(level)
        must_wait = below is not None and not self.suspended(below)
        # What a shared tier below has no copy of yet waits, too, except where room is needed now.
        only_copied = must_wait and partial and below is not None and below.shared is not None
        gone_children: dict[bytes, int] = {}

        def may_evict(key: BlockKey) -> bool:
            record = self.tree.get(key)
            if record is None or any(index > level.index for index in record.levels):
                return True
            if (must_wait and key in self.unsaved) or only_copied:
                return False
            if len(record.levels) > 1:
                return True
            return self.tree.child_count(key) == gone_children.get(key, 0)

        def unblocks(key: BlockKey) -> BlockKey | None:
            record = self.tree.get(key)
            if record is None or len(record.levels) > 1:
                return None
            gone_children[record.parent] = gone_children.get(record.parent, 0) + 1
            return BlockKey(record.parent)

        victims = level.lru.victims(need_bytes, may_evict, unblocks, partial=partial)
        if not victims and must_wait and not partial and below is not None and below.shared:
            # A shared tier may not take anything for minutes: what is new is worth more then.
            must_wait = False
            gone_children.clear()
            victims = level.lru.victims(need_bytes, may_evict, unblocks)
        taken = [doomed for key in victims if (doomed := self.drop_copy(level, key))]
        for doomed in taken:
            if doomed.key in self.tree:
                level.stats.demoted_blocks += 1
            else:
                level.stats.evicted_blocks += 1
        return taken

    def below(self, level: Level) -> Level | None:
        return self.levels[level.index + 1] if level.index + 1 < len(self.levels) else None

    # --- weather -------------------------------------------------------------------------------

    def suspended(self, level: Level) -> bool:
        """A shared tier rests until a probe has succeeded: no client's call is to find out."""
        if level.shared is not None and level.consecutive_failures:
            return True
        return self.clock() < level.suspended_until

    def resting(self) -> list[int]:
        """Indices of the shared levels nothing can be had from now."""
        return [v.index for v in self.levels if v.shared is not None and self.suspended(v)]

    def reachable(self, record: BlockRecord) -> int | None:
        """The nearest level that holds the block and does not rest for being out of reach."""
        resting = self.resting()
        if not resting:
            return min(record.levels)
        return min((index for index in record.levels if index not in resting), default=None)

    def failed(self, level: Level, error: OSError, what: str) -> None:
        """Counts an OSError and rests the level; nothing is deleted because of one."""
        name = errno.errorcode.get(error.errno or 0, type(error).__name__)
        level.stats.failures[name] = level.stats.failures.get(name, 0) + 1
        step = min(level.consecutive_failures, len(_SUSPEND_SECONDS) - 1)
        level.consecutive_failures += 1
        level.suspended_until = self.clock() + _SUSPEND_SECONDS[step]
        log.warning(
            "tier failed: tier=%s op=%s error=%s rest_seconds=%g",
            level.tier.kind.label,
            what,
            error,
            _SUSPEND_SECONDS[step],
        )

    def worked(self, level: Level) -> None:
        level.consecutive_failures = 0
        level.suspended_until = 0.0
