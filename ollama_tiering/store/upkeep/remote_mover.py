"""Everything that is done to a shared tier in the background, in a thread of its own.

Removes, describes, looks and claims, and copies blocks down from the tier above. The thread may
wait for deadlines of the tier: nothing of RAM or local waits for it.
"""

from __future__ import annotations

import logging
import threading
import time
from typing import Final, cast

from ollama_tiering.errors import StoreDamaged
from ollama_tiering.store.block.blockfile import read_meta
from ollama_tiering.store.block.key import BlockKey
from ollama_tiering.store.books.state import Level, StoreState
from ollama_tiering.store.books.tree import BlockRecord
from ollama_tiering.store.errors import NotAuthentic
from ollama_tiering.store.tiers.authenticity import MAX_AUTHENTIC_BYTES
from ollama_tiering.store.tiers.contract import SharedTier, TierKind
from ollama_tiering.store.upkeep import shares
from ollama_tiering.store.upkeep.graveyard import Block, Graveyard
from ollama_tiering.store.upkeep.index import IndexRow
from ollama_tiering.store.upkeep.mover import Mover
from ollama_tiering.store.upkeep.rescan import Rescan

log = logging.getLogger(__name__)

_IDLE_SECONDS: Final = 0.5
_STOP_SECONDS: Final = 1.0
_PROBE_BYTES: Final = 8 << 20
_PART_BYTES: Final = 1 << 20


class RemoteMover(Mover):
    """`step` as of Mover, for one shared level. One driver at a time."""

    def __init__(
        self,
        state: StoreState,
        level: Level,
        rows: dict[BlockKey, IndexRow],
        graveyard: Graveyard,
        *,
        period_seconds: float,
        high_watermark: float,
        low_watermark: float,
    ) -> None:
        super().__init__(state, high_watermark=high_watermark, low_watermark=low_watermark)
        assert level.shared is not None
        self._level = level
        self._graveyard = graveyard
        self._books = level.shared
        self._tier = cast(SharedTier, level.tier)  # that is what `shared` says
        self._rescan = Rescan(
            state,
            level,
            level.shared,
            self._tier,
            rows,
            period_seconds=period_seconds,
            high_watermark=high_watermark,
            low_watermark=low_watermark,
        )
        self._read_bytes = 0  # by clients, when it was last looked at
        self._demoting = False
        self._stalled = False
        self._stopping = threading.Event()
        self._thread: threading.Thread | None = None

    def start(self) -> None:
        self._thread = threading.Thread(target=self._run, name="remote-mover", daemon=True)
        self._thread.start()

    def finish(self, seconds: float) -> bool:
        """Ends the thread. True: it has ended in that time, and `step` has blocks to write down
        that are in RAM only; what a local tier holds needs no haste, nor to be waited for.
        """
        self._stopping.set()
        urgent = self._state.levels[self._level.index - 1].tier.kind is TierKind.RAM
        if self._thread is not None:
            self._thread.join(seconds if urgent else min(seconds, _STOP_SECONDS))
            if self._thread.is_alive():  # it ends once its tier is closed
                return False
        return urgent

    def step(self) -> bool:
        return self.recover() and (self.tidy() or self.look() or self.drop() or self.demote_one())

    def recover(self) -> bool:
        """Whether the tier may be used. After a rest one cheap call finds out (half-open)."""
        state, level = self._state, self._level
        if not level.consecutive_failures:
            return True
        stalled = self._tier.stalled > 0
        came_back = self._stalled and not stalled  # a call that hung has returned
        self._stalled = stalled
        if not came_back and state.clock() < level.suspended_until:
            return False
        try:
            self._tier.probe()
        except OSError as error:
            with state.lock:
                state.failed(level, error, "probe")
            return False
        with state.lock:
            state.worked(level)
        log.info("tier is back: tier=%s", level.tier.kind.label)
        return True

    def tidy(self) -> bool:
        """Removes one block, or describes one namespace, that somebody asked for."""
        state, books = self._state, self._books
        with state.lock:
            described = next(iter(books.to_describe.items()), None)
            doomed = next(iter(books.doomed.items()), None)
        if described is None and doomed is None:
            self._graveyard.flush()
            return False
        try:
            if described is not None:
                self._tier.describe(*described)
                with state.lock:
                    books.to_describe.pop(described[0], None)
            if doomed is not None:
                self._remove(*doomed)
        except OSError as error:
            with state.lock:
                state.failed(self._level, error, "remove")
            return False
        return True

    def _remove(self, block: Block, removed: float | None) -> None:
        """`removed`: when a person removed it; what was stored there since stays."""
        if removed is None:
            self._tier.remove(*block)
        elif not self._stored_since(block, removed):
            self._tier.remove(*block)
            self._tier.remove_quarantined(*block)
        with self._state.lock:
            if self._books.doomed.get(block, -1.0) == removed:
                del self._books.doomed[block]
                self._graveyard.lift(*block)

    def _stored_since(self, block: Block, removed: float) -> bool:
        record = self._state.tree.get(block[1])
        if record is not None and self._level.index in record.levels:
            return True
        try:
            with self._tier.peek(*block) as opened:
                created = read_meta(opened.read_at, opened.file_bytes).created_unix_seconds
        except NotAuthentic:
            return True  # not ours to remove, and never used
        except (FileNotFoundError, StoreDamaged):
            return False
        return created > removed

    def look(self) -> bool:
        if not self._rescan.due():
            return False
        try:
            self._rescan.run(self._stopping.is_set)
            self.measure()
        except OSError as error:
            with self._state.lock:
                self._state.failed(self._level, error, "scan")
            return False
        return True

    def drop(self) -> bool:
        """What is above a model's budget, and what nobody used for too long: not this sidecar, nor
        any other, for they tell each other by the files' times.
        """
        state, level = self._state, self._level
        if not self._books.scanned:
            return False
        over = bool(state.terms.with_budget) and shares.shrink(state, level)
        return self._expiry.run(state, [level]) or over

    def measure(self) -> None:
        """Times reading a part of the oldest block, unless clients read since the last time.

        A tier that was once measured slow, or never, would else not be chosen, and never measured.
        """
        state, level = self._state, self._level
        if level.stats.read_bytes != self._read_bytes:
            self._read_bytes = level.stats.read_bytes
            return
        with state.lock:
            key = next(iter(level.lru), None)
            record = state.tree.get(key) if key is not None else None
        if record is None or self._stopping.is_set():
            return
        try:
            self._tier.settle(record.namespace, record.key)  # not from this machine's own memory
            with self._tier.peek(record.namespace, record.key) as block:
                length = min(block.file_bytes, _PROBE_BYTES)
                start = time.perf_counter()
                for offset in range(0, length, _PART_BYTES):
                    block.read_at(offset, min(_PART_BYTES, length - offset))
                level.speed.add_read(length, time.perf_counter() - start)
        except (FileNotFoundError, NotAuthentic):
            pass  # removed or replaced by another sidecar

    def demote_one(self) -> bool:
        """Copies one block down: RAM's unsaved ones, or the oldest of a local tier that is full."""
        state, level = self._state, self._level
        source = state.levels[level.index - 1] if level.index else None
        if source is None or not self._books.scanned:
            return False
        with state.lock:
            from_ram = source.tier.kind is TierKind.RAM
            record = self._unsaved(source) if from_ram else self._oldest(source)
            if record is None or state.suspended(source):
                return False
            state.pin(record.key)
            self._books.doomed.pop((record.namespace, record.key), None)
        try:
            done = self._graveyard.make_way(record.namespace, record.key) and self.copy(
                record, source, level
            )
        finally:
            with state.lock:
                state.unpin(record.key)
        with state.lock:
            if done:
                state.unsaved.discard(record.key)
                state.work.set()  # it may be evicted above now
            elif record.key in state.unsaved:
                state.unsaved.defer(record.key)
        return done

    def _unsaved(self, source: Level) -> BlockRecord | None:
        state = self._state
        while ready := state.unsaved.ready(state.clock(), 1):
            (key,) = ready
            record = state.tree.get(key)
            if record is not None and self._wanted(record, source):
                return record
            state.unsaved.discard(key)
        return None

    def _oldest(self, source: Level) -> BlockRecord | None:
        """Between the high and the low watermark: what has no copy below yet."""
        budget = source.lru.budget_bytes
        if source.lru.claimed_bytes > self._high * budget:
            self._demoting = True
        elif source.lru.claimed_bytes <= int(self._low * budget):
            self._demoting = False
        if not self._demoting:
            return None
        for key in source.lru:
            record = self._state.tree.get(key)
            if record is not None and not source.lru.pinned(key) and self._wanted(record, source):
                return record
        return None

    def _wanted(self, record: BlockRecord, source: Level) -> bool:
        """Whether a copy below is missing, and possible."""
        return (
            source.index in record.levels
            and self._level.index not in record.levels
            and not self._state.terms.of(record.namespace).refusal
            and record.file_bytes <= min(self._level.lru.budget_bytes, MAX_AUTHENTIC_BYTES)
        )

    def _run(self) -> None:
        while not self._stopping.is_set():
            try:
                busy = self.step()
            except Exception:  # the thread must outlive any bug in one piece of work
                log.exception("remote mover failed")
                busy = False
            if not busy:
                self._stopping.wait(_IDLE_SECONDS)


def of_shared_level(
    state: StoreState,
    rows: dict[BlockKey, IndexRow],
    graveyard: Graveyard,
    *,
    period_seconds: float,
    high_watermark: float,
    low_watermark: float,
) -> RemoteMover | None:
    """The mover of the store's shared level, if it has one."""
    for level in state.levels:
        if level.shared is not None:
            return RemoteMover(
                state,
                level,
                rows,
                graveyard,
                period_seconds=period_seconds,
                high_watermark=high_watermark,
                low_watermark=low_watermark,
            )
    return None
