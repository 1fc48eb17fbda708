"""Copies blocks that a client cannot read where they lie into a tier where it can.

Several at a time, each verified by its checksums on the way, in threads of its own: a client waits
for a block at most for the deadline, and then has a miss.
"""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Final

from ollama_tiering.store.report import LeasedBlock
from ollama_tiering.store.state import Level, StoreState
from ollama_tiering.store.tree import BlockRecord

STAGING_THREADS: Final = 4
_STRIPES: Final = 64

Copy = Callable[[BlockRecord, Level, Level], bool]
Locate = Callable[[BlockRecord], LeasedBlock | None]


def client_can_read(level: Level, record: BlockRecord) -> bool:
    """Whether a client on this host may be given the path of this copy and read it as it is.

    Not on a shared tier: opening a file there could hang the client.
    """
    return level.shared is None


class Stager:
    """Thread-safe. `copy` is Mover's; `locate` finds a copy a client can read."""

    def __init__(self, state: StoreState, copy: Copy, locate: Locate) -> None:
        self._state = state
        self._copy = copy
        self._locate = locate
        self._pool = ThreadPoolExecutor(STAGING_THREADS, thread_name_prefix="block-stage")
        self._meters = {level.index: _BusyMeter(level) for level in state.levels if level.shared}
        # A block that two clients ask for is copied once: the second one waits, then finds it.
        self._stripes = [threading.Lock() for _ in range(_STRIPES)]

    def possible(self, record: BlockRecord) -> bool:
        """Whether any copy can be tried now. No I/O; takes the lock."""
        state = self._state
        with state.lock:
            return state.tree.get(record.key) is record and state.reachable(record) is not None

    def stage(self, record: BlockRecord) -> Future[LeasedBlock | None]:
        """The copy to be, or None where none could be made. The caller has the block pinned."""
        return self._pool.submit(self._stage, record)

    def close(self) -> None:
        self._pool.shutdown(wait=False, cancel_futures=True)

    def _stage(self, record: BlockRecord) -> LeasedBlock | None:
        state = self._state
        with self._stripes[record.key[0] % _STRIPES], self._pinned(record):
            if (block := self._locate(record)) is not None:
                return block
            with state.lock:
                resting = state.resting()
                sources = [state.levels[i] for i in sorted(record.levels) if i not in resting]
                targets = [
                    level
                    for level in state.levels
                    if client_can_read(level, record) and not state.suspended(level)
                ]
            for source in sources:
                for target in targets:
                    copied = self._copied(record, source, target)
                    if copied:
                        with state.lock:
                            target.stats.promoted_blocks += 1
                            state.counters.get_blocks += 1
                            state.counters.get_bytes += record.file_bytes
                        return self._locate(record)
                    if source.index not in record.levels or state.suspended(source):
                        break  # it is the source that failed
        return None

    @contextlib.contextmanager
    def _pinned(self, record: BlockRecord) -> Iterator[None]:
        """Its lease may end meanwhile."""
        with self._state.lock:
            self._state.pin(record.key)
        try:
            yield
        finally:
            with self._state.lock:
                self._state.unpin(record.key)

    def _copied(self, record: BlockRecord, source: Level, target: Level) -> bool:
        meter = self._meters.get(source.index)
        if meter is None:
            return self._copy(record, source, target)
        meter.begin()
        copied = False
        try:
            copied = self._copy(record, source, target)
        finally:
            meter.end(record.file_bytes if copied else 0)
        return copied


class _BusyMeter:
    """Bytes per second of a level while anything is copied from it, however many at a time.

    That is what a client that asks for several blocks gets. A time in which a copy failed says
    nothing. Thread-safe.
    """

    def __init__(self, level: Level) -> None:
        self._level = level
        self._lock = threading.Lock()
        self._active = 0
        self._since = 0.0
        self._copied_bytes = 0
        self._spoilt = False

    def begin(self) -> None:
        with self._lock:
            if not self._active:
                self._since, self._copied_bytes, self._spoilt = time.perf_counter(), 0, False
            self._active += 1

    def end(self, copied_bytes: int) -> None:
        with self._lock:
            self._active -= 1
            self._copied_bytes += copied_bytes
            self._spoilt = self._spoilt or not copied_bytes
            if not self._active and not self._spoilt:
                seconds = time.perf_counter() - self._since
                self._level.speed.add_read(self._copied_bytes, seconds)
