"""Asks the files of a tier what it really holds, while the store serves what the index knew.

First every file is counted; until that is done nothing is written to the tier, for its budget could
not be kept. Then the headers of files the index does not know are read, the newest file first.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable
from typing import Final

from ollama_tiering.store.block.blockfile import check_place, read_meta
from ollama_tiering.store.block.key import BlockKey
from ollama_tiering.store.books.state import Level, StoreState
from ollama_tiering.store.books.tree import BlockRecord
from ollama_tiering.store.errors import CorruptBlock, UnsupportedFormat
from ollama_tiering.store.tiers.contract import StoredBlock
from ollama_tiering.store.upkeep import unusable
from ollama_tiering.store.upkeep.opening import record_of_meta

log = logging.getLogger(__name__)

_RETRY_SECONDS: Final = 5.0
_RECORDS_PER_HOLD: Final = 2000  # of the lock: look-ups must not wait for longer


class Survey:
    """Of all levels, fastest first. When everything is known `then` is called and `done` set."""

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
        """For a thread: a tier that fails is asked again."""
        unknown = []
        for level in self._own:
            while not level.surveyed and not self._stop.is_set():
                try:
                    unknown.append((level, self._count(level)))
                except OSError as error:
                    with self._state.lock:
                        self._state.failed(level, error, "survey")
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
            with state.lock:
                if stored.key not in seen and self._known(level, stored):
                    seen.add(stored.key)
                elif stored.key not in state.leaving:
                    unknown.append(stored)
        with state.lock:
            for key in [key for key in level.lru if key not in seen]:
                state.forget_copy(level, key)
            level.kept_bytes += sum(stored.stored_bytes for stored in unknown)
            level.surveyed = True
            state.count_overhead(level)
        unknown.sort(key=lambda stored: stored.modified, reverse=True)
        return unknown

    def _known(self, level: Level, stored: StoredBlock) -> bool:
        record = self._state.tree.get(stored.key)
        if record is None or level.index not in record.levels:
            return False
        if (record.namespace, record.bytes_at(level.index)) != (
            stored.namespace,
            stored.file_bytes,
        ):
            return False
        if level.lru.stored_bytes(stored.key) != stored.stored_bytes:
            level.count(stored.namespace, stored.stored_bytes - level.lru.stored_bytes(stored.key))
            level.lru.resize(stored.key, stored.stored_bytes)
            self._state.index_changed.add(stored.key)
        return True

    def _read(self, unknown: list[tuple[Level, list[StoredBlock]]]) -> None:
        for level, files in unknown:
            for stored in files:
                if self._stop.is_set():
                    return
                self._take(level, stored)
        orphans = self._demote_orphans()
        state = self._state
        top = state.levels[0]
        if state.below(top) is None:
            return
        with state.lock:
            for key in list(top.lru):
                record = state.tree.get(key)
                if record is not None and len(record.levels) == 1 and key not in orphans:
                    state.admission.committed(record, top, tail=False)

    def _demote_orphans(self) -> set[BlockKey]:
        """Blocks no prompt can reach, for what comes before them is gone: a crash between two
        writers, damage. They are kept, for it may be stored again, but go first.
        """
        state = self._state
        orphans: set[BlockKey] = set()
        with state.lock:
            records = list(state.tree)
        for start in range(0, len(records), _RECORDS_PER_HOLD):
            with state.lock:
                for record in records[start : start + _RECORDS_PER_HOLD]:
                    if record.parent != record.namespace and record.parent not in state.tree:
                        self._demote(record, orphans)
        if orphans:
            log.info("blocks without what comes before them: %d", len(orphans))
        return orphans

    def _demote(self, record: BlockRecord, orphans: set[BlockKey]) -> None:
        """The block and all below it, so that the leaves end up as the very first. Lock held."""
        waiting = [record]
        for one in waiting:
            orphans.add(one.key)
            for index in one.levels:
                self._state.levels[index].lru.demote(one.key)
            waiting += self._state.tree.children(one.key)

    def _take(self, level: Level, stored: StoredBlock) -> None:
        """Enters one file into the books, or says why not. Its bytes are counted either way."""
        state = self._state
        record = self._header(level, stored)
        stays = record is None and self._exists(level, stored)
        with state.lock:
            if not stays:
                level.kept_bytes -= stored.stored_bytes
            if record is not None:
                known = state.tree.get(record.key)
                if (known is None or level.index not in known.levels) and (
                    record.key not in state.leaving
                ):
                    state.add_copy(record, level, stored.stored_bytes, oldest=True)
            state.count_overhead(level)

    def _exists(self, level: Level, stored: StoredBlock) -> bool:
        try:
            return level.tier.exists(stored.namespace, stored.key)
        except OSError:
            return True

    def _header(self, level: Level, stored: StoredBlock) -> BlockRecord | None:
        try:
            with level.tier.peek(stored.namespace, stored.key) as block:
                meta = read_meta(block.read_at, block.file_bytes)
            check_place(meta, stored.namespace, stored.key)
        except FileNotFoundError:
            return None
        except UnsupportedFormat as error:
            unusable.say_unusable(self._state, level, stored.key, error)
            return None
        except CorruptBlock as error:
            log.warning("block damaged: key=%s reason=%s", stored.key.hex(), error)
            unusable.quarantine(self._state, level, stored.namespace, stored.key)
            return None
        except OSError as error:
            log.warning("block not readable now, kept: key=%s error=%s", stored.key.hex(), error)
            return None
        return record_of_meta(meta, level, self._last_use(stored))

    def _last_use(self, stored: StoredBlock) -> float:
        """Nobody knows it any more: a file says when it was written, not when it was last read. So
        it keeps at least half of its time to live. Where room is short it goes first all the same.
        """
        now = self._state.wall_clock()
        ttl_seconds = self._state.terms.of(stored.namespace).ttl_seconds
        return max(stored.modified, now - ttl_seconds / 2)
