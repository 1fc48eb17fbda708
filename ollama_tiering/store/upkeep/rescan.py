"""Looks at a shared tier: adopts what others stored, forgets what they removed, claims room.

Run by one thread, the only one that writes to the tier, so that nothing is written between counting
and claiming. How claims keep the budget: ollama_tiering.store.books.sharing.
"""

from __future__ import annotations

import logging
import random
from collections.abc import Callable
from typing import Final

from ollama_tiering.store.block.blockfile import check_place, read_meta
from ollama_tiering.store.block.key import BlockKey
from ollama_tiering.store.books.sharing import SharedBooks, fair_share, generations
from ollama_tiering.store.books.state import Level, StoreState
from ollama_tiering.store.books.tree import BlockRecord
from ollama_tiering.store.errors import CorruptBlock, UnsupportedFormat
from ollama_tiering.store.tiers.contract import Neighbour, SharedTier, StoredBlock
from ollama_tiering.store.upkeep import room, unusable
from ollama_tiering.store.upkeep.index import IndexRow
from ollama_tiering.store.upkeep.opening import depths_of, record_of_meta, record_of_row

log = logging.getLogger(__name__)

SETTLE_SECONDS: Final = 60.0  # after which a network file system shows a new name to all
AGAIN_SECONDS: Final = 5.0  # after a scan that could not give what was wanted

_JITTER: Final = 0.2  # so that sidecars do not claim in step
_TOUCH_AFTER_SECONDS: Final = 60.0  # a use is told to the others at most so often
_MAX_TOUCHES: Final = 1000
_KEYS_PER_HOLD: Final = 1000  # of the lock


class Rescan:
    """Not thread-safe. `rows` are what the index knew: they spare reading headers once."""

    def __init__(
        self,
        state: StoreState,
        level: Level,
        books: SharedBooks,
        tier: SharedTier,
        rows: dict[BlockKey, IndexRow],
        *,
        period_seconds: float,
        high_watermark: float,
        low_watermark: float,
    ) -> None:
        self._state = state
        self._level = level
        self._books = books
        self._tier = tier
        self._rows = rows
        self._period_seconds = period_seconds
        self._high = high_watermark
        self._low = low_watermark
        self._due = 0.0
        self._again = 0.0  # the same, while a block waits for room
        self._seen_bytes = 0  # physical, of everything the last scan saw
        self._generation = random.getrandbits(31)  # not that of an earlier life
        self._announced_at: float | None = None  # first, by the tier's time
        self._adopted = False  # blocks that have no place by their recency yet

    def due(self) -> bool:
        due = min(self._due, self._again) if self._books.wanted_bytes else self._due
        return self._state.clock() >= due

    def run(self, stopping: Callable[[], bool] = lambda: False) -> None:
        """One look at everything. OSError passes: what was learnt until then stays."""
        state, books = self._state, self._books
        jitter = 1 + random.uniform(-_JITTER, _JITTER)
        begun = state.clock()
        self._due = begun + self._period_seconds * jitter
        books.scanning = True
        whole = False
        try:
            now = self._announce(books.allowance_bytes)
            if self._announced_at is None:
                self._announced_at = now
            neighbours = self._tier.neighbours()
            with state.lock:
                known = set(self._level.lru)
            uses = self._look(state.wall_clock() - now, stopping)
            if uses is None:
                return
            self._forget(known - uses.keys())
            self._share_recency(uses)
            self._trim()
            books.scanned = True
            self._claim(neighbours, now)
            whole = True
        finally:
            books.scanning = False
            took = state.clock() - begun
            self._again = begun + took + max(AGAIN_SECONDS, 10 * took) * jitter
            if not whole:
                self._due = min(self._due, self._again)

    def _look(
        self, offset_seconds: float, stopping: Callable[[], bool]
    ) -> dict[BlockKey, float] | None:
        """Every block there is: when it was last used, by our wall clock. None: interrupted."""
        state, level = self._state, self._level
        uses: dict[BlockKey, float] = {}
        kept_bytes = 0
        passed_over: set[BlockKey] = set()
        seen_bytes = 0
        for stored in self._tier.scan():
            if stopping():
                return None
            modified = stored.modified + offset_seconds
            seen_bytes += stored.stored_bytes
            if self._as_known(stored):
                uses[stored.key] = modified
            elif self._same_as_ever(stored) or not (record := self._record(stored, modified)):
                kept_bytes += stored.stored_bytes
                passed_over.add(stored.key)
            else:
                with state.lock:
                    if (stored.namespace, stored.key) not in self._books.doomed:
                        known = state.add_copy(record, level, stored.stored_bytes)
                        uses[stored.key] = max(modified, known.last_use)
                        self._adopted = True
        self._rows = {}
        with state.lock:
            before = self._books.passed_over
            self._books.passed_over = {k: before[k] for k in passed_over & before.keys()}
            level.kept_bytes = kept_bytes
            self._books.foreign_bytes = self._tier.foreign_bytes
            state.count_overhead(level)
        others = self._books.foreign_bytes + self._tier.quarantined_bytes()
        self._seen_bytes = seen_bytes + others
        return uses

    def _as_known(self, stored: StoredBlock) -> bool:
        """Not where another sidecar, of another encoding, stored the same block over ours."""
        record = self._state.tree.get(stored.key)
        if record is None or self._level.index not in record.levels:
            return False
        return record.bytes_at(self._level.index) == stored.file_bytes

    def _same_as_ever(self, stored: StoredBlock) -> bool:
        """Whether it could not be used before, and is the same file still."""
        now = (stored.file_bytes, stored.modified)
        with self._state.lock:
            before = self._books.passed_over.get(stored.key, (-1, 0.0))
            if before is None or before == now:
                self._books.passed_over[stored.key] = now
                return True
        return False

    def _record(self, stored: StoredBlock, modified: float) -> BlockRecord | None:
        row = self._rows.get(stored.key) if stored.has_mac else None
        if row and (row.namespace, row.file_bytes) == (stored.namespace, stored.file_bytes):
            record = record_of_row(row, self._level)
            record.last_use = modified
            return record
        try:
            with self._tier.peek(stored.namespace, stored.key) as block:
                meta = read_meta(block.read_at, block.file_bytes)
            check_place(meta, stored.namespace, stored.key)
        except UnsupportedFormat as error:
            unusable.say_unusable(self._state, self._level, stored.key, error)
            with self._state.lock:
                seen = (stored.file_bytes, stored.modified)
                self._books.passed_over[stored.key] = seen
        except CorruptBlock as error:
            log.warning("block damaged: key=%s reason=%s", stored.key.hex(), error)
            unusable.quarantine(self._state, self._level, stored.namespace, stored.key)
        except FileNotFoundError:
            pass
        except TimeoutError:
            raise
        except OSError as error:
            log.warning("block not readable now: key=%s error=%s", stored.key.hex(), error)
        else:
            return record_of_meta(meta, self._level, modified)
        return None

    def _forget(self, missing: set[BlockKey]) -> None:
        state = self._state
        for key in missing:
            with state.lock:
                state.forget_copy(self._level, key)

    def _share_recency(self, uses: dict[BlockKey, float]) -> None:
        """The latest use by any sidecar counts: others' come in, ours go out, the LRU follows."""
        state, level = self._state, self._level
        order: list[tuple[float, int, BlockKey]] = []
        ours: list[BlockRecord] = []
        keys = list(uses)
        parents: dict[BlockKey, bytes] = {}
        changed, self._adopted = self._adopted, False
        for start in range(0, len(keys), _KEYS_PER_HOLD):
            with state.lock:
                for key in keys[start : start + _KEYS_PER_HOLD]:
                    record = state.tree.get(key)
                    if record is None:
                        continue
                    parents[key] = record.parent
                    if uses[key] > record.last_use:
                        record.last_use = uses[key]
                        changed = True
                    elif record.last_use > uses[key] + _TOUCH_AFTER_SECONDS:
                        ours.append(record)
        depths = depths_of(parents)
        if changed:
            for key in parents:
                record = state.tree.get(key)
                if record is not None:
                    order.append((record.last_use, -depths[key], key))
            order.sort()
        for start in range(0, len(order), _KEYS_PER_HOLD):
            with state.lock:
                for _, _, key in order[start : start + _KEYS_PER_HOLD]:
                    level.lru.touch([key])
        ours.sort(key=lambda record: (record.last_use, -depths[record.key]))
        for record in ours[-_MAX_TOUCHES:]:  # leaves first: they stay the first to be evicted
            try:
                self._tier.touch(record.namespace, record.key)
            except FileNotFoundError:
                self._forget({record.key})

    def _trim(self) -> None:
        """The last tier drops what was not used for longest, down to the low watermark."""
        state, level = self._state, self._level
        budget = level.lru.budget_bytes
        with state.lock:
            claimed = level.lru.claimed_bytes
            surplus = 0
            if claimed > self._high * budget:
                surplus = claimed - int(self._low * budget)
            doomed = state.take_victims(level, surplus, partial=True) if surplus > 0 else []
        room.unlink(state, doomed)

    def _claim(self, before: list[Neighbour], now: float) -> None:
        state, level, books, tier = self._state, self._level, self._books, self._tier
        settle = SETTLE_SECONDS if tier.caches_names else 0.0
        assert self._announced_at is not None
        young = now - self._announced_at < settle
        if young:
            self._due = min(self._due, state.clock() + settle)
        after = tier.neighbours()
        unclear = young or generations(after) != generations(before)
        with state.lock:
            books.neighbours = len(after)
            claims = sum(neighbour.claim_bytes for neighbour in before) + self._unseen_bytes()
            # Not by the books: what left them may be there yet.
            free = level.lru.budget_bytes - self._seen_bytes - claims
            wanted = books.wanted_bytes
            allowance = 0 if unclear else fair_share(free, wanted, len(after) + 1)
            raised = allowance > books.allowance_bytes
            # Room that is only claimed comes back when its claimant looks again: nothing is dropped
            # for that.
            short = wanted - (free + claims) if wanted and not unclear else 0
            doomed = state.take_victims(level, short, partial=True) if short > 0 else []
        room.unlink(state, doomed)
        if raised:
            self._generation += 1
        self._announce(allowance)
        if raised and generations(tier.neighbours()) != generations(after):
            allowance = 0  # another one claimed at the same time
            self._announce(0)
        with state.lock:
            books.grant(allowance, state.clock(), state.wall_clock())

    def _announce(self, allowance_bytes: int) -> float:
        with self._state.lock:
            claim_bytes = allowance_bytes + self._unseen_bytes()
        return self._tier.announce(self._generation, claim_bytes)

    def _unseen_bytes(self) -> int:
        """What we wrote so lately that a listing, here or elsewhere, may not show it yet."""
        now = self._state.clock()
        seen_seconds = 2 * SETTLE_SECONDS if self._tier.caches_names else 0.0
        written_bytes = self._books.written_bytes(now, now - seen_seconds)
        return written_bytes if seen_seconds else 0
