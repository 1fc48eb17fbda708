"""Everything the store's one lock protects. No I/O here: what must be unlinked is handed out.

Every method expects the caller to hold `lock`, which only modules of this package do: the verbs.
"""

from __future__ import annotations

import errno
import functools
import math
import threading
import time
from collections import OrderedDict
from collections.abc import Callable, Iterable, Sequence
from typing import TypeVar

from ollama_tiering.store.block.key import BlockKey
from ollama_tiering.store.books.admission import Admission
from ollama_tiering.store.books.encodings import TierEncodings
from ollama_tiering.store.books.eviction import choose_victims
from ollama_tiering.store.books.leases import LeaseTable
from ollama_tiering.store.books.level import Counters as Counters
from ollama_tiering.store.books.level import Doomed as Doomed
from ollama_tiering.store.books.level import Level as Level
from ollama_tiering.store.books.lru import ByteLru
from ollama_tiering.store.books.pins import PinTable
from ollama_tiering.store.books.policy import StorePolicy
from ollama_tiering.store.books.shared_books import SharedBooks
from ollama_tiering.store.books.speed import SpeedMeter
from ollama_tiering.store.books.suspects import Suspects
from ollama_tiering.store.books.terms import Decide, Terms, TermsTable
from ollama_tiering.store.books.tree import BlockRecord, BlockTree
from ollama_tiering.store.books.watch import Watch
from ollama_tiering.store.books.write_queue import WriteQueue
from ollama_tiering.store.tiers.contract import Tier, TierKind
from ollama_tiering.store.tiers.daily_writes import DailyWrites
from ollama_tiering.store.tiers.space import FreeSpace

K = TypeVar("K")

_PROMOTABLE_BLOCKS = 1024
PROMOTE_AFTER_SECONDS = 10.0
_FULL_SECONDS = 5.0
_SUSPEND_SECONDS = (1.0, 2.0, 5.0, 15.0, 30.0, 60.0)


class StoreState:
    def __init__(
        self,
        tiers: Sequence[tuple[Tier, int]],
        *,
        encodings: TierEncodings | None = None,
        clock: Callable[[], float] = time.monotonic,
        wall_clock: Callable[[], float] = time.time,
        policy: StorePolicy | None = None,
        daily: DailyWrites | None = None,
        decide: Decide | None = None,
    ) -> None:
        self.policy = policy or StorePolicy()
        always = Terms(ttl_seconds=self.policy.ttl_seconds)
        self.terms = TermsTable(decide or (lambda _: always))
        self.lock = threading.Lock()
        self.encodings = encodings or TierEncodings()
        self.clock = clock
        self.wall_clock = wall_clock
        self.tree = BlockTree()
        self.levels = [
            Level(
                index,
                tier,
                ByteLru(budget),
                SpeedMeter(tier),
                shared=SharedBooks() if tier.announces else None,
            )
            for index, (tier, budget) in enumerate(tiers)
        ]
        floor_percent = self.policy.min_free_percent
        for level in self.levels:
            directory = level.tier.directory
            if floor_percent and level.tier.wears_disk and directory is not None:
                level.space = FreeSpace(directory, floor_percent, clock)
        daily = daily or DailyWrites(None, self.policy.daily_write_bytes, wall_clock=wall_clock)
        self.admission = Admission(self, self.policy, daily)
        self.leases = LeaseTable(clock)
        self.pins = PinTable()
        self.counters = Counters()
        self.writing: set[BlockKey] = set()  # reserved, not committed
        # Out of the books of a level, its file not yet unlinked: index of the level, and key.
        self.leaving: dict[tuple[int, BlockKey], int] = {}
        self.leaving_children: dict[bytes, int] = {}  # copies being unlinked, by parent
        self.early: dict[bytes, list[BlockKey]] = {}  # children committed before their parent
        self.unsaved = WriteQueue()  # to be written down a level
        self.promotable: OrderedDict[BlockKey, float] = OrderedDict()  # from this time on
        self.staging: dict[BlockKey, threading.Event] = {}  # being copied for a client now
        self.to_sample: list[BlockKey] = []  # read a little of each, to time their tier
        self.suspects = Suspects()  # perhaps lost, as blocks before them are
        self.index_changed: set[BlockKey] = set()
        self.watch = Watch()
        self.work = threading.Event()  # something for the background

    # --- books ---------------------------------------------------------------------------------

    def add_copy(
        self, record: BlockRecord, level: Level, stored_bytes: int, *, oldest: bool = False
    ) -> BlockRecord:
        """Records that `level` holds the block; returns the record that now stands for it."""
        known = self.tree.get(record.key)
        if known is None:
            self.tree.add(record)
            known = record
            came = self.pins.window_came if record.window else self.pins.block_came
            came(record.parent)
        if record is not known:
            known.encoded.pop(level.index, None)
            known.encoded.update(record.encoded)
        if level.index not in known.levels:
            level.raw_bytes += known.file_bytes
            level.count(known.namespace, stored_bytes)
        else:
            level.count(known.namespace, stored_bytes - level.lru.stored_bytes(known.key))
        known.add_level(level.index)
        level.lru.add(known.key, stored_bytes, oldest=oldest, hit=known.wanted)
        self.index_changed.add(record.key)
        return known

    def drop_copy(self, level: Level, key: BlockKey) -> Doomed | None:
        """Takes one copy out of the books; the caller unlinks its file and calls `gone`."""
        record = self.tree.get(key)
        if record is None or level.index not in record.levels:
            return None
        record.drop_level(level.index)
        record.encoded.pop(level.index, None)
        level.raw_bytes -= record.file_bytes
        doomed = Doomed(level, record.namespace, key, level.lru.retire(key), record.parent)
        held_bytes = doomed.reservation.reserved_bytes
        doomed.reservation.ended = functools.partial(level.count, record.namespace, -held_bytes)
        level.leaving_bytes += doomed.reservation.reserved_bytes
        count = self.leaving_children.get(record.parent, 0)
        self.leaving_children[record.parent] = count + 1
        self.leaving[level.index, key] = self.leaving.get((level.index, key), 0) + 1
        if not record.levels:
            self._forget(record)
            if level.index:
                self.admission.trim(self.levels[0])
        elif level.index == 0:
            self.unsaved.discard(key)
        self.index_changed.add(key)
        return doomed

    def is_leaving(self, level: Level, key: BlockKey) -> bool:
        """Whether a file of that name is about to be unlinked: a new one would go in its place."""
        return (level.index, key) in self.leaving

    def gone(self, doomed: Doomed, *, unlinked: bool) -> None:
        doomed.reservation.release()
        doomed.level.leaving_bytes -= doomed.reservation.reserved_bytes
        if not unlinked:  # the file is still there: its bytes stay counted until the next start
            doomed.level.kept_bytes += doomed.reservation.reserved_bytes
            self.count_overhead(doomed.level)
        _count_down(self.leaving, (doomed.level.index, doomed.key))
        _count_down(self.leaving_children, doomed.parent)

    def count_overhead(self, level: Level) -> None:
        """Call it whenever files that are no blocks came or went."""
        level.lru.overhead_bytes = (
            level.kept_bytes + level.headroom_bytes + level.tier.overhead_bytes()
        )
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
        self.pins.window_went(record.key)
        self.unsaved.discard(record.key)
        self.admission.forget(record.key)
        self.promotable.pop(record.key, None)

    # --- use -----------------------------------------------------------------------------------

    def hold(self, key: BlockKey) -> None:
        """It is not evicted from any tier until it is let go as often as it was held."""
        for level in self.levels:
            level.lru.hold(key)

    def let_go(self, key: BlockKey) -> None:
        for level in self.levels:
            level.lru.let_go(key)

    def held(self, key: BlockKey) -> bool:
        return self.levels[0].lru.held(key)

    def touch(self, leaf_to_root: Iterable[BlockRecord], *, hit: bool = False) -> None:
        """Marks as used, the leaf first: so it is also the first of them to be evicted.

        A hit is a prompt that matched; a block that is written or read again is no hit.
        """
        now = self.wall_clock()
        keys = []
        for record in leaf_to_root:
            record.last_use = now
            record.hits += hit
            keys.append(record.key)
        self.index_changed.update(keys)
        for level in self.levels:
            level.lru.touch(keys, hit=hit)

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
            seconds += self.encodings.decode_seconds(record.file_bytes)
        return seconds

    def expire(self) -> None:
        self.end_use(self.leases.expire(self.clock()))

    def end_use(self, keys: Iterable[BlockKey]) -> None:
        """What was leased and read is let go, and worth having in the fastest tier.

        Not sooner: a promotion while the client reads would compete with it for the disk. Nor at
        once: the client computes now, which on a small machine takes all cores, and somebody waits
        for its first token.
        """
        promoted_from = self.clock() + PROMOTE_AFTER_SECONDS
        for key in keys:
            self.let_go(key)
            record = self.tree.get(key)
            if record is None or 0 in record.levels or len(self.levels) == 1:
                continue
            self.promotable.pop(key, None)
            if len(self.promotable) < _PROMOTABLE_BLOCKS:
                self.promotable[key] = promoted_from

    def count_served(self, blocks: Iterable[tuple[TierKind, int]]) -> None:
        """Blocks named to a client, with the tier it reads them from."""
        by_kind = {level.tier.kind: level.stats for level in self.levels}
        for kind, file_bytes in blocks:
            by_kind[kind].served_blocks += 1
            by_kind[kind].served_bytes += file_bytes

    # --- eviction ------------------------------------------------------------------------------

    def kept_by_pin(self, level: Level, key: BlockKey) -> bool:
        """Whether a person's pin forbids to evict this copy: it is the lowest on this host.

        Another host may drop what lies in a remote tier, so a copy there is not enough.
        """
        if not self.pins.keeps(key):
            return False
        record = self.tree.get(key)
        return record is None or not any(
            index > level.index and not self.levels[index].tier.is_shared for index in record.levels
        )

    def take_victims(self, level: Level, need_bytes: int, *, partial: bool = False) -> list[Doomed]:
        """Least valuable copies that free `need_bytes`; none if that cannot be reached, or as many
        as possible with `partial`. What may go and in which order: eviction.py.
        """
        if need_bytes <= 0:
            return []
        self.expire()
        return self.take(level, choose_victims(self, level, need_bytes, partial=partial))

    def take(self, level: Level, keys: Iterable[BlockKey]) -> list[Doomed]:
        """Out of the books, and counted as evicted or demoted."""
        taken: list[Doomed] = []
        for key in keys:
            record = self.tree.get(key)
            if record is None or not (doomed := self.drop_copy(level, key)):
                continue
            taken.append(doomed)
            if key in self.tree:
                level.stats.demoted_blocks += 1
            else:
                level.stats.evicted_blocks += 1
                self.watch.evicted(record, self.wall_clock())
        return taken

    def drop_early(self, parent: bytes) -> list[Doomed]:
        """The parent was not stored after all: what was committed below it meanwhile goes too."""
        doomed: list[Doomed] = []
        waiting = self.early.pop(parent, [])
        kept = []  # in use just now: the mover tries again
        while waiting:
            key = waiting.pop()
            record = self.tree.get(key)
            if record is None:
                continue
            if self.held(key):
                kept.append(key)
                continue
            waiting += [child.key for child in self.tree.children(key)]
            levels = [self.levels[index] for index in sorted(record.levels)]
            doomed += [one for level in levels if (one := self.drop_copy(level, key))]
        if kept:
            self.early[parent] = kept
        return doomed[::-1]  # children first, should the process die before all are unlinked

    def below(self, level: Level) -> Level | None:
        return self.levels[level.index + 1] if level.index + 1 < len(self.levels) else None

    # --- weather -------------------------------------------------------------------------------

    def suspended(self, level: Level) -> bool:
        """A shared tier rests until a probe has succeeded: no client's call is to find out."""
        if level.shared is not None and level.consecutive_failures:
            return True
        return self.clock() < level.suspended_until

    def waits_for(self, level: Level) -> bool:
        """Whether blocks that are to be written to the level should be kept until they are."""
        return not (
            self.suspended(level)
            or self.clock() < level.full_until
            or self.admission.exhausted(level)
        )

    def is_full(self, level: Level) -> None:
        level.full_until = self.clock() + _FULL_SECONDS

    def resting(self) -> list[int]:
        """Indices of the shared levels nothing can be had from now."""
        return [v.index for v in self.levels if v.shared is not None and self.suspended(v)]

    def reachable(self, record: BlockRecord) -> int | None:
        """The nearest level that holds the block and does not rest for being out of reach."""
        resting = self.resting()
        if not resting:
            return min(record.levels)
        return min((index for index in record.levels if index not in resting), default=None)

    def failed(self, level: Level, error: OSError) -> float:
        """Counts an OSError and rests the level; nothing is deleted because of one. For how long
        it begins to rest now, in seconds; 0 where it rests already.

        What fails beside the one that made it rest, or after, does not make it rest longer.
        """
        name = errno.errorcode.get(error.errno or 0, type(error).__name__)
        level.stats.failures[name] = level.stats.failures.get(name, 0) + 1
        if self.clock() < level.suspended_until:
            return 0.0
        step = min(level.consecutive_failures, len(_SUSPEND_SECONDS) - 1)
        level.consecutive_failures += 1
        level.suspended_until = self.clock() + _SUSPEND_SECONDS[step]
        return _SUSPEND_SECONDS[step]

    def worked(self, level: Level) -> None:
        level.consecutive_failures = 0
        level.suspended_until = 0.0


def _count_down(counts: dict[K, int], key: K) -> None:
    left = counts.pop(key, 0) - 1
    if left > 0:
        counts[key] = left
