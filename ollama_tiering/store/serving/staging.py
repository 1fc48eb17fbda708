"""Copies blocks that a client cannot read as they are into a tier where it can.

A client maps or reads raw block files of tiers on this machine: what a shared tier holds is copied,
what a tier holds encoded is decoded. Several at a time, so that decoding overlaps reading, each
verified by its checksums on the way, in threads of its own: a client waits for a block at most for
the deadline, and then has a miss.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from typing import Final

from ollama_tiering.store.books.report import LeasedBlock
from ollama_tiering.store.books.state import Level, StoreState
from ollama_tiering.store.books.tree import BlockRecord
from ollama_tiering.system.daemon_pool import DaemonPool

STAGING_THREADS: Final = 4

Copy = Callable[[BlockRecord, Level, Level], bool]  # from, to; False: it is not there
Locate = Callable[[BlockRecord], LeasedBlock | None]


def readable_by_client(level: Level, record: BlockRecord) -> bool:
    """Whether a client on this host may be given the path of this copy and read it as it is.

    Not on a shared tier: opening a file there could hang the client. Not what is encoded.
    """
    return level.shared is None and level.index not in record.encoded


class Stager:
    """Thread-safe. `copy` is Mover's; `locate` finds a copy a client can read."""

    def __init__(self, state: StoreState, copy: Copy, locate: Locate) -> None:
        self._state = state
        self._copy = copy
        self._locate = locate
        self._pool = DaemonPool(STAGING_THREADS, "block-stage")

    def possible(self, record: BlockRecord) -> bool:
        """Whether any copy can be tried now. No I/O; takes the lock."""
        state = self._state
        with state.lock:
            return state.tree.get(record.key) is record and state.reachable(record) is not None

    def stage(self, record: BlockRecord) -> Future[LeasedBlock | None]:
        """The copy to be, or None where none could be made. The caller has the block pinned."""
        return self._pool.submit(self._stage, record)

    def close(self) -> None:
        self._pool.close()

    def _stage(self, record: BlockRecord) -> LeasedBlock | None:
        state = self._state
        with self._alone(record):
            if (block := self._locate(record)) is not None:
                return block
            with state.lock:
                sources = [state.levels[index] for index in state.soonest_first(record)]
                targets = [
                    level
                    for level in state.levels
                    if level.shared is None
                    and level.index not in record.levels
                    and state.codec.keeps_raw(level, record.namespace)
                    and not state.suspended(level)
                ]
            for source in sources:
                for target in targets:
                    if self._copy(record, source, target):
                        with state.lock:
                            target.stats.promoted_blocks += 1
                            state.counters.get_blocks += 1
                            state.counters.get_bytes += record.file_bytes
                            state.count_served([(target.tier.kind, record.file_bytes)])
                        return self._locate(record)
                    if source.index not in record.levels or state.suspended(source):
                        break  # it is the source that failed
        return None

    @contextlib.contextmanager
    def _alone(self, record: BlockRecord) -> Iterator[None]:
        """A block that two clients ask for is copied once: the second one waits, then finds it.
        Pinned meanwhile, since its lease may end.
        """
        state = self._state
        while True:
            with state.lock:
                running = state.staging.get(record.key)
                if running is None:
                    done = state.staging[record.key] = threading.Event()
                    state.pin(record.key)
                    break
            running.wait()
        try:
            yield
        finally:
            with state.lock:
                state.unpin(record.key)
                del state.staging[record.key]
            done.set()
