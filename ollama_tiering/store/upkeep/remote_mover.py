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
from ollama_tiering.store.books import copies, graves, shared_work, weather
from ollama_tiering.store.books.graves import Block
from ollama_tiering.store.books.state import Level, StoreState
from ollama_tiering.store.errors import NotAuthentic
from ollama_tiering.store.tiers.contract import SharedTier
from ollama_tiering.store.upkeep import chain_check, making_room
from ollama_tiering.store.upkeep.graveyard import Graveyard
from ollama_tiering.store.upkeep.index import IndexRow
from ollama_tiering.store.upkeep.mover import Mover
from ollama_tiering.store.upkeep.rescan import Rescan

log = logging.getLogger(__name__)

_IDLE_SECONDS: Final = 0.5
_STOP_SECONDS: Final = 1.0
_PROBE_BYTES: Final = 8 << 20
_PART_BYTES: Final = 1 << 20
_HEAD_BYTES: Final = 4096  # that shows whether a block can be read
_PROBED_BLOCKS: Final = 8  # the oldest, of which one is read


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
        self._probed = 0  # which of the oldest blocks is read to try the tier
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
        urgent = self._state.levels[self._level.index - 1].tier.is_volatile
        if self._thread is not None:
            self._thread.join(seconds if urgent else min(seconds, _STOP_SECONDS))
            if self._thread.is_alive():  # it ends once its tier is closed
                return False
        return urgent

    def step(self) -> bool:
        return self.recover() and (
            self.tidy()
            or chain_check.step_shared(self._state, self._level)
            or self.look()
            or self.drop()
            or self.demote_one()
        )

    def recover(self) -> bool:
        """Whether the tier may be used. After a rest a cheap call and a short read find out
        (half-open): a share that answers but gives no bytes is not back.
        """
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
            self._read_a_little()
        except OSError as error:
            # The disk may be bad at this block alone: another one at the next try.
            self._probed = (self._probed + 1) % _PROBED_BLOCKS
            weather.failed(state, level, error, "probe")
            return False
        weather.worked(state, level)
        log.info("tier is back: tier=%s", level.tier.kind.label)
        return True

    def _read_a_little(self) -> None:
        """Reads, but not from this machine's own memory."""
        record = shared_work.oldest(self._state, self._level, self._probed)
        if record is None:
            return
        try:
            self._tier.drop_pages(record.namespace, record.key)
            with self._tier.peek(record.namespace, record.key) as block:
                block.read_at(0, min(block.file_bytes, _HEAD_BYTES))
        except (FileNotFoundError, NotAuthentic):
            pass  # removed or replaced by another sidecar

    def tidy(self) -> bool:
        """Removes one block, or describes one namespace, that somebody asked for."""
        state, level = self._state, self._level
        errand = shared_work.next_errand(state, level)
        if errand.described is None and errand.doomed is None:
            self._graveyard.flush()
            return False
        try:
            if errand.described is not None:
                self._tier.describe(*errand.described)
                shared_work.described(state, level, errand.described[0])
            if errand.doomed is not None:
                self._remove(*errand.doomed)
        except OSError as error:
            weather.failed(state, level, error, "remove")
            return False
        return True

    def _remove(self, block: Block, removed: float | None) -> None:
        """`removed`: when a person removed it; what was stored there since stays."""
        if removed is None:
            self._tier.remove(*block)
        elif not self._stored_since(block, removed):
            self._tier.remove(*block)
            self._tier.remove_quarantined(*block)
        graves.removed_there(self._state, self._graveyard.graves, self._level, block, removed)

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
            weather.failed(self._state, self._level, error, "scan")
            return False
        return True

    def drop(self) -> bool:
        """What is above a model's budget, and what nobody used for too long: not this sidecar, nor
        any other, for they tell each other by the files' times.
        """
        state, level = self._state, self._level
        if not self._books.scanned:
            return False
        over = bool(state.terms.with_budget) and making_room.shrink_models(state, level)
        return self._expiry.run(state, [level]) or over

    def measure(self) -> None:
        """Times reading a part of an old block, unless clients read since the last time.

        A tier that was once measured slow, or never, would else not be chosen, and never measured.
        """
        state, level = self._state, self._level
        if level.stats.read_bytes != self._read_bytes:
            self._read_bytes = level.stats.read_bytes
            return
        record = shared_work.oldest(state, level, self._probed)
        if record is None or self._stopping.is_set():
            return
        try:
            self._tier.drop_pages(
                record.namespace, record.key
            )  # not from this machine's own memory
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
        record, self._demoting = shared_work.next_demotion(
            state, level, source, self._high, self._low, demoting=self._demoting
        )
        if record is None:
            return False
        try:
            done = self._graveyard.make_way(record.namespace, record.key) and self.copy(
                record, source, level
            )
        finally:
            copies.let_go(state, [record.key])
        shared_work.demoted(state, record, done=done)
        return done

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
