"""Copies blocks that a client cannot read as they are into a tier where it can.

A client maps or reads raw block files of tiers on this machine: what a shared tier holds is copied,
what a tier holds encoded is decoded. Several at a time, so that decoding overlaps reading, each
verified by its checksums on the way, in threads of its own: a client waits for a block at most for
the deadline, and then has a miss.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from typing import Final

from ollama_tiering.store.books import lending
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
    return level.tier.clients_open and level.index not in record.encoded


class Stager:
    """Thread-safe. `copy` is Mover's; `locate` finds a copy a client can read."""

    def __init__(self, state: StoreState, copy: Copy, locate: Locate) -> None:
        self._state = state
        self._copy = copy
        self._locate = locate
        self._pool = DaemonPool(STAGING_THREADS, "block-stage")

    def possible(self, record: BlockRecord) -> bool:
        """Whether any copy can be tried now. No I/O."""
        return lending.can_be_staged(self._state, record)

    def stage(self, record: BlockRecord) -> Future[LeasedBlock | None]:
        """The copy to be, or None if it could not be made. The caller holds the block."""
        return self._pool.submit(self._stage, record)

    def close(self) -> None:
        self._pool.close()

    def _stage(self, record: BlockRecord) -> LeasedBlock | None:
        state = self._state
        with self._alone(record):
            if (block := self._locate(record)) is not None:
                return block
            sources, targets = lending.ways_to_stage(state, record)
            for source in sources:
                for target in targets:
                    if self._copy(record, source, target):
                        lending.staged(state, record, target)
                        return self._locate(record)
                    if source.index not in record.levels or state.suspended(source):
                        break  # it is the source that failed
        return None

    @contextlib.contextmanager
    def _alone(self, record: BlockRecord) -> Iterator[None]:
        """A block that two clients ask for is copied once: the second one waits, then finds it.
        Held meanwhile, since its lease may end.
        """
        while (running := lending.begin_staging(self._state, record.key)) is not None:
            running.wait()
        try:
            yield
        finally:
            lending.end_staging(self._state, record.key)
