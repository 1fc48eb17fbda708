"""Answers a lease block by block: what a client can read at once, what is staged for it first.

Blocks are held, and let go, in pieces: the lock is held for PIECE_BLOCKS of them at a time.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import CancelledError, Future
from dataclasses import dataclass
from typing import Final

from ollama_tiering.store.block.key import BlockKey, NamespaceId
from ollama_tiering.store.books import lending, weather
from ollama_tiering.store.books.report import Leased, LeasedBlock
from ollama_tiering.store.books.state import StoreState
from ollama_tiering.store.books.tree import BlockRecord
from ollama_tiering.store.errors import NoRoom
from ollama_tiering.store.serving.lookup import PIECE_BLOCKS
from ollama_tiering.store.serving.staging import Copy, Stager, readable_by_client
from ollama_tiering.store.upkeep import chain_check

log = logging.getLogger(__name__)

LOCATED: Final = 256  # blocks whose files are looked at before they are named
_SAMPLES_PER_LEASE: Final = 4

Awaited = LeasedBlock | Future[LeasedBlock | None]


@dataclass(slots=True)
class Leasing:
    """A lease that is being answered. Its holder waits for each block, at most `deadline_seconds`;
    the first that is None or late ends the run (`give_up`).
    """

    lease_id: int
    blocks: list[Awaited]
    deadline_seconds: float
    lease_seconds: float
    missed: Callable[[str], None]

    def give_up(self, reason: str | None = None) -> None:
        """No more blocks are waited for; with a reason, that is a miss."""
        for block in self.blocks:
            if isinstance(block, Future):
                block.cancel()
        if reason is not None:
            self.missed(reason)

    def wait(self) -> Leased:
        """All of it. Blocks the caller; never longer than the deadline without another block."""
        ready: list[LeasedBlock] = []
        for awaited in self.blocks:
            try:
                block = self._result(awaited)
            except (TimeoutError, CancelledError):
                self.give_up("not staged in time")
                break
            if block is None:
                self.give_up("not staged")
                break
            ready.append(block)
        return Leased(self.lease_id, ready)

    def _result(self, awaited: Awaited) -> LeasedBlock | None:
        if isinstance(awaited, LeasedBlock):
            return awaited
        return awaited.result(self.deadline_seconds)


class Leaser:
    """Thread-safe."""

    def __init__(
        self, state: StoreState, copy: Copy, *, lease_seconds: float, deadline_seconds: float
    ) -> None:
        self._state = state
        self._lease_seconds = lease_seconds
        self._deadline_seconds = deadline_seconds
        self._stager = Stager(state, copy, self.locate)

    def begin(self, namespace: NamespaceId, keys: Sequence[BlockKey]) -> Leasing:
        """Holds the leading run of `keys` that is stored, until release or the lease's end. NoRoom
        when too many are leased already.
        """
        lease_id, pieces = self.begin_in_pieces(namespace, keys)
        blocks = [block for piece in pieces for block in piece.blocks]
        return Leasing(lease_id, blocks, self._deadline_seconds, self._lease_seconds, self._missed)

    def begin_in_pieces(
        self, namespace: NamespaceId, keys: Sequence[BlockKey]
    ) -> tuple[int, Iterator[Leasing]]:
        """Works as `begin`: the lease's id, and its blocks, LOCATED at a time, for a caller that
        names the first ones while the next are located.
        """
        state = self._state
        lease_id = lending.open_lease(state, self._lease_seconds)
        if state.terms.of(namespace).refusal:
            keys = ()  # the look-up before counted it as a miss
        records: list[BlockRecord] = []
        for start in range(0, len(keys), PIECE_BLOCKS):
            part = keys[start : start + PIECE_BLOCKS]
            try:
                run = lending.lend(state, lease_id, namespace, part)
            except NoRoom:
                self.release(lease_id)
                raise
            records += run
            if len(run) < len(part):
                break
        for start in reversed(range(0, len(records), PIECE_BLOCKS)):  # the leaf is used first
            lending.used(state, records[start : start + PIECE_BLOCKS])
        return lease_id, self._located(lease_id, records)

    def _located(self, lease_id: int, records: Sequence[BlockRecord]) -> Iterator[Leasing]:
        for start in range(0, len(records), LOCATED):
            part = records[start : start + LOCATED]
            blocks: list[Awaited] = []
            for record in part:
                block = self.locate(record)
                if block is not None:
                    blocks.append(block)
                elif self._stager.possible(record):
                    blocks.append(self._stager.stage(record))
                else:
                    break
            self._count(blocks)
            yield Leasing(
                lease_id, blocks, self._deadline_seconds, self._lease_seconds, self._missed
            )
            if len(blocks) < len(part):
                return

    def renew(self, lease_id: int) -> bool:
        """It lasts as long again, from now on. False when it is over already."""
        return lending.renew_lease(self._state, lease_id, self._lease_seconds)

    def release(self, lease_id: int) -> None:
        """Ends a lease; one that is over already is fine."""
        state = self._state
        keys = lending.close_lease(state, lease_id)
        for start in range(0, len(keys), PIECE_BLOCKS):
            lending.end_use(state, keys[start : start + PIECE_BLOCKS])

    def locate(self, record: BlockRecord) -> LeasedBlock | None:
        """The nearest copy a client can read whose file is there. No lock; the block is held."""
        state = self._state
        for index in sorted(record.levels):
            level = state.levels[index]
            if not readable_by_client(level, record):
                continue
            try:
                if chain_check.whole(state, level, record) and readable_by_client(level, record):
                    return LeasedBlock(
                        record.key,
                        record.namespace,
                        level.tier.kind,
                        level.tier.path(record.namespace, record.key),
                        record.file_bytes,
                    )
            except OSError as error:
                weather.failed(state, level, error, "lookup", miss="i/o error")
                continue
            weather.missed(state, "file gone")
        return None

    def close(self) -> None:
        self._stager.close()

    def _count(self, blocks: Sequence[Awaited]) -> None:
        ready = [block for block in blocks if isinstance(block, LeasedBlock)]
        lending.served(self._state, ready, _SAMPLES_PER_LEASE)

    def _missed(self, reason: str) -> None:
        weather.missed(self._state, reason)
