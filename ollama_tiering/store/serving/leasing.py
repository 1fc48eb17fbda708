"""Answers a lease block by block: what a client can read at once, what is staged for it first.

Blocks are pinned, and let go, in pieces: the lock is held for PIECE_BLOCKS of them at a time.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from concurrent.futures import CancelledError, Future
from dataclasses import dataclass
from typing import Final

from ollama_tiering.store.block.key import BlockKey, NamespaceId
from ollama_tiering.store.books.report import Leased, LeasedBlock
from ollama_tiering.store.books.state import StoreState
from ollama_tiering.store.books.tree import BlockRecord
from ollama_tiering.store.errors import NoRoom
from ollama_tiering.store.serving.lookup import PIECE_BLOCKS
from ollama_tiering.store.serving.staging import Copy, Stager, readable_by_client
from ollama_tiering.store.tiers.contract import TierKind

log = logging.getLogger(__name__)

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
        """Pins the leading run of `keys` that is stored, until release or the lease's end. NoRoom
        when too many are leased already.
        """
        state = self._state
        with state.lock:
            state.expire()
            state.leases.check_room(0)
            lease_id = state.leases.open((), state.clock() + self._lease_seconds)
            if state.terms.of(namespace).refusal:
                keys = ()  # the look-up before counted it as a miss
        records: list[BlockRecord] = []
        for start in range(0, len(keys), PIECE_BLOCKS):
            part = keys[start : start + PIECE_BLOCKS]
            try:
                run = self._pin(lease_id, namespace, part)
            except NoRoom:
                self.release(lease_id)
                raise
            records += run
            if len(run) < len(part):
                break
        for start in reversed(range(0, len(records), PIECE_BLOCKS)):  # the leaf is used first
            with state.lock:
                self._use(records[start : start + PIECE_BLOCKS])
        blocks: list[Awaited] = []
        for record in records:
            block = self.locate(record)
            if block is not None:
                blocks.append(block)
            elif self._stager.possible(record):
                blocks.append(self._stager.stage(record))
            else:
                break
        self._count(blocks)
        return Leasing(lease_id, blocks, self._deadline_seconds, self._lease_seconds, self._missed)

    def release(self, lease_id: int) -> None:
        """Ends a lease; one that is over already is fine."""
        state = self._state
        with state.lock:
            keys = state.leases.close(lease_id)
        for start in range(0, len(keys), PIECE_BLOCKS):
            with state.lock:
                state.end_use(keys[start : start + PIECE_BLOCKS])

    def _pin(
        self, lease_id: int, namespace: NamespaceId, keys: Sequence[BlockKey]
    ) -> list[BlockRecord]:
        """The leading run of `keys` that is stored, now the lease's. NoRoom."""
        state = self._state
        records: list[BlockRecord] = []
        with state.lock:
            for key in keys:
                record = state.tree.get(key)
                if record is None or record.namespace != namespace:
                    state.counters.miss("evicted")
                    break
                records.append(record)
            held = [record.key for record in records]
            state.leases.check_room(len(held), new=False)
            if not state.leases.extend(lease_id, held):
                return []  # it took as long as a lease lasts
            for key in held:
                state.pin(key)
        return records

    def _use(self, records: Sequence[BlockRecord]) -> None:
        """Of a window block this is the hit: the look-up before was one of its chain only, and no
        prompt matches it. So it is protected as the chain is, and worth the disk. Lock held.
        """
        state = self._state
        state.touch(reversed(records))
        windows = [record for record in reversed(records) if record.window]
        if windows:
            state.touch(windows, hit=True)
            for window in windows:
                state.admission.used((window,))

    def locate(self, record: BlockRecord) -> LeasedBlock | None:
        """The nearest copy a client can read whose file is there. Without the lock, pinned."""
        state = self._state
        for index in sorted(record.levels):
            level = state.levels[index]
            if not readable_by_client(level, record):
                continue
            try:
                if level.tier.exists(record.namespace, record.key):
                    return LeasedBlock(
                        record.key,
                        record.namespace,
                        level.tier.kind,
                        level.tier.path(record.namespace, record.key),
                        record.file_bytes,
                    )
            except OSError as error:
                with state.lock:
                    state.failed(level, error, "lookup")
                    state.counters.miss("i/o error")
                continue
            with state.lock:
                state.forget_copy(level, record.key)
                state.counters.miss("file gone")
        return None

    def close(self) -> None:
        self._stager.close()

    def _count(self, blocks: Sequence[Awaited]) -> None:
        state = self._state
        ready = [block for block in blocks if isinstance(block, LeasedBlock)]
        with state.lock:
            state.counters.get_blocks += len(ready)
            state.counters.get_bytes += sum(block.file_bytes for block in ready)
            state.count_served((block.tier, block.file_bytes) for block in ready)
            cold = [block.key for block in ready if block.tier is not TierKind.RAM]
            if cold:
                # The last ones: the client has not read them when they are looked at.
                state.to_sample = cold[-_SAMPLES_PER_LEASE:]
                state.work.set()

    def _missed(self, reason: str) -> None:
        with self._state.lock:
            self._state.counters.miss(reason)
