"""Looks at a shared tier: adopts what others stored, forgets what they removed, claims room.

Run by one thread, the only one that writes to the tier, so that nothing is written between counting
and claiming. How claims keep the budget: ollama_tiering.store.books.shared_books.
"""

from __future__ import annotations

import logging
import random
from collections.abc import Callable
from typing import Final

from ollama_tiering.store.block.key import BlockKey
from ollama_tiering.store.books import copies, found, recency, shared_room
from ollama_tiering.store.books.recency import Uses
from ollama_tiering.store.books.shared_books import SharedBooks, generations
from ollama_tiering.store.books.state import Level, StoreState
from ollama_tiering.store.books.tree import BlockRecord
from ollama_tiering.store.tiers.contract import Neighbour, SharedTier, StoredBlock
from ollama_tiering.store.upkeep import judging, unlinking
from ollama_tiering.store.upkeep.index import IndexRow
from ollama_tiering.store.upkeep.judging import Verdict
from ollama_tiering.store.upkeep.opening import depths_of, record_of_meta, record_of_row

log = logging.getLogger(__name__)

SETTLE_SECONDS: Final = 60.0  # after which a network file system shows a new name to all
AGAIN_SECONDS: Final = 5.0  # after a scan that could not give what was wanted

_JITTER: Final = 0.2  # so that sidecars do not claim in step
_TOUCH_AFTER_SECONDS: Final = 60.0  # a use is told to the others at most so often
_MAX_TOUCHES: Final = 1000
_KEYS_PER_HOLD: Final = 1000  # of the lock


class Rescan:
    """Is not thread-safe. `rows` are what the index knew: they spare reading headers once."""

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
            known = found.keys_at(state, self._level)
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
            elif found.passed_over_before(state, level, stored) or not (
                record := self._record(stored, modified)
            ):
                kept_bytes += stored.stored_bytes
                passed_over.add(stored.key)
            else:
                known = found.adopt(state, level, record, stored.stored_bytes)
                if known is not None:
                    uses[stored.key] = max(modified, known.last_use)
                    self._adopted = True
        self._rows = {}
        found.looked_through(state, level, passed_over, kept_bytes, self._tier.foreign_bytes)
        others = self._books.foreign_bytes + self._tier.quarantined_bytes()
        self._seen_bytes = seen_bytes + others
        return uses

    def _as_known(self, stored: StoredBlock) -> bool:
        """Tells; no if another sidecar, of another encoding, stored the same block over ours."""
        record = self._state.tree.get(stored.key)
        if record is None or self._level.index not in record.levels:
            return False
        return record.bytes_at(self._level.index) == stored.file_bytes

    def _record(self, stored: StoredBlock, modified: float) -> BlockRecord | None:
        row = self._rows.get(stored.key) if stored.has_mac else None
        if row and (row.namespace, row.file_bytes) == (stored.namespace, stored.file_bytes):
            record = record_of_row(row, self._level)
            record.last_use = modified
            return record
        meta = judging.look(self._state, self._level, stored.namespace, stored.key, known=False)
        if not isinstance(meta, judging.Unfit):
            return record_of_meta(meta, self._level, modified)
        if meta.verdict is Verdict.OF_NO_USE:
            found.pass_over(self._state, self._level, stored)
        elif isinstance(meta.error, TimeoutError):
            raise meta.error
        elif meta.verdict is Verdict.NOT_NOW:
            log.warning("block not readable now: key=%s error=%s", stored.key.hex(), meta.error)
        return None

    def _forget(self, missing: set[BlockKey]) -> None:
        for key in missing:
            copies.forget(self._state, self._level, key)

    def _share_recency(self, uses: dict[BlockKey, float]) -> None:
        """The latest use by any sidecar counts: others' come in, ours go out, the LRU follows."""
        state, level = self._state, self._level
        order: list[tuple[float, int, BlockKey]] = []
        keys = list(uses)
        compared = Uses(changed=self._adopted)
        self._adopted = False
        for start in range(0, len(keys), _KEYS_PER_HOLD):
            part = keys[start : start + _KEYS_PER_HOLD]
            recency.compare(state, part, uses, compared, _TOUCH_AFTER_SECONDS)
        depths = depths_of(compared.parents)
        if compared.changed:
            for key in compared.parents:
                record = state.tree.get(key)
                if record is not None:
                    order.append((record.last_use, -depths[key], key))
            order.sort()
        for start in range(0, len(order), _KEYS_PER_HOLD):
            touched = [key for _, _, key in order[start : start + _KEYS_PER_HOLD]]
            shared_room.touch_each(state, level, touched)
        ours = sorted(compared.ours, key=lambda record: (record.last_use, -depths[record.key]))
        for record in ours[-_MAX_TOUCHES:]:  # leaves first: they stay the first to be evicted
            try:
                self._tier.touch(record.namespace, record.key)
            except FileNotFoundError:
                self._forget({record.key})

    def _trim(self) -> None:
        """The last tier drops what was not used for longest, down to the low watermark."""
        doomed = shared_room.down_to(self._state, self._level, self._high, self._low)
        unlinking.unlink(self._state, doomed)

    def _claim(self, before: list[Neighbour], now: float) -> None:
        state, level, tier = self._state, self._level, self._tier
        settle = SETTLE_SECONDS if tier.caches_names else 0.0
        assert self._announced_at is not None
        young = now - self._announced_at < settle
        if young:
            self._due = min(self._due, state.clock() + settle)
        after = tier.neighbours()
        unclear = young or generations(after) != generations(before)
        plan = shared_room.plan_claim(
            state,
            level,
            before,
            len(after),
            self._seen_bytes,
            unclear=unclear,
            unseen_seconds=self._unseen_seconds,
        )
        unlinking.unlink(state, plan.doomed)
        allowance = plan.allowance_bytes
        if plan.raised:
            self._generation += 1
        self._announce(allowance)
        if plan.raised and generations(tier.neighbours()) != generations(after):
            allowance = 0  # another one claimed at the same time
            self._announce(0)
        shared_room.grant(state, level, allowance)

    def _announce(self, allowance_bytes: int) -> float:
        claim_bytes = shared_room.announced_bytes(
            self._state, self._level, allowance_bytes, self._unseen_seconds
        )
        return self._tier.announce(self._generation, claim_bytes)

    @property
    def _unseen_seconds(self) -> float:
        """Says for how long a listing, here or elsewhere, may not show what was written."""
        return 2 * SETTLE_SECONDS if self._tier.caches_names else 0.0
