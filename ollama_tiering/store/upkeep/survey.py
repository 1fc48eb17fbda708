"""Asks the files of a tier what it really holds, while the store serves what the index knew.

First every file is counted; until that is done nothing is written to the tier, for its budget could
not be kept. Then the headers of files the index does not know are read, the newest file first.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable
from typing import Final

from ollama_tiering.store.block.key import BlockKey
from ollama_tiering.store.books import found, reading, weather
from ollama_tiering.store.books.state import Level, StoreState
from ollama_tiering.store.books.tree import BlockRecord
from ollama_tiering.store.tiers.contract import StoredBlock
from ollama_tiering.store.upkeep import judging
from ollama_tiering.store.upkeep.opening import record_of_meta

log = logging.getLogger(__name__)

_RETRY_SECONDS: Final = 5.0
_RECORDS_PER_HOLD: Final = 2000  # of the lock: look-ups must not wait for longer


class Survey:
    """A survey of all levels, fastest first. When everything is known `then` is called and `done`
    set.
    """

    def __init__(
        self, state: StoreState, stop: threading.Event, *, then: Callable[[], None]
    ) -> None:
        self._state = state
        self._then = then
        # A shared tier is looked at by a thread of its own, again and again.
        self._own = [level for level in state.levels if level.shared is None]
        self._stop = stop
        self.done = threading.Event()

    def run(self) -> None:
        """Once, on the caller's time. OSError passes: a store that cannot see is not opened."""
        unknown = [(level, self._count(level)) for level in self._own]
        self._read(unknown)
        self._then()
        self.done.set()

    def run_until_done(self) -> None:
        """Runs in a thread: a tier that fails is asked again."""
        unknown = []
        for level in self._own:
            while not level.surveyed and not self._stop.is_set():
                try:
                    unknown.append((level, self._count(level)))
                except OSError as error:
                    weather.failed(self._state, level, error, "survey")
                    self._stop.wait(_RETRY_SECONDS)
                except Exception:
                    log.exception("survey failed")
                    return
        try:
            self._read(unknown)
            self._then()
        except Exception:
            log.exception("survey failed")
        self.done.set()

    def _count(self, level: Level) -> list[StoredBlock]:
        """Compares books and files; what the books do not know, newest first."""
        state = self._state
        seen: set[BlockKey] = set()
        unknown: list[StoredBlock] = []
        for stored in level.tier.scan():
            if self._stop.is_set():
                return []
            if found.compare(state, level, stored, seen) is found.FileIs.UNKNOWN:
                unknown.append(stored)
        found.all_counted(state, level, seen, sum(stored.stored_bytes for stored in unknown))
        unknown.sort(key=lambda stored: stored.modified, reverse=True)
        return unknown

    def _read(self, unknown: list[tuple[Level, list[StoredBlock]]]) -> None:
        for level, files in unknown:
            for stored in files:
                if self._stop.is_set():
                    return
                self._take(level, stored)
        found.want_saved(self._state, but=self._demote_orphans())

    def _demote_orphans(self) -> set[BlockKey]:
        """Blocks no prompt can reach, for what comes before them is gone: a crash between two
        writers, damage. They are kept, for it may be stored again, but go first.
        """
        orphans: set[BlockKey] = set()
        records = reading.records(self._state)
        for start in range(0, len(records), _RECORDS_PER_HOLD):
            part = records[start : start + _RECORDS_PER_HOLD]
            orphans |= found.demote_orphans(self._state, part)
        if orphans:
            log.info("blocks without what comes before them: %d", len(orphans))
        return orphans

    def _take(self, level: Level, stored: StoredBlock) -> None:
        """Enters one file into the books, or says why not. Its bytes are counted either way."""
        record = self._header(level, stored)
        stays = record is None and self._exists(level, stored)
        found.enter(self._state, level, stored, record, stays=stays)

    def _exists(self, level: Level, stored: StoredBlock) -> bool:
        try:
            return level.tier.exists(stored.namespace, stored.key)
        except OSError:
            return True

    def _header(self, level: Level, stored: StoredBlock) -> BlockRecord | None:
        meta = judging.look(self._state, level, stored.namespace, stored.key, known=False)
        if isinstance(meta, judging.Unfit):
            if meta.verdict is judging.Verdict.NOT_NOW:
                said = "block not readable now, kept: key=%s error=%s"
                log.warning(said, stored.key.hex(), meta.error)
            return None
        return record_of_meta(meta, level, self._last_use(stored))

    def _last_use(self, stored: StoredBlock) -> float:
        """Nobody knows it any more: a file says when it was written, not when it was last read. So
        it keeps at least half of its time to live. Where room is short it goes first all the same.
        """
        now = self._state.wall_clock()
        ttl_seconds = self._state.terms.of(stored.namespace).ttl_seconds
        return max(stored.modified, now - ttl_seconds / 2)
