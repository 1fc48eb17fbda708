"""TieredStore: the block store's policy over an ordered list of tiers, fastest first.

Thread-safe. One lock guards the books and is never held during I/O. Promises: budgets hold at all
times, reservations included; a chain never has a hole that eviction made; an OSError deletes
nothing; a damaged block is a miss and is quarantined.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Final

from ollama_tiering.store import damage, lookup, opening, room
from ollama_tiering.store.codec import Codec
from ollama_tiering.store.errors import InvalidBlock
from ollama_tiering.store.index import BlockIndex
from ollama_tiering.store.key import BlockKey, NamespaceId, namespace_digest
from ollama_tiering.store.leasing import Leaser, Leasing
from ollama_tiering.store.mover import Mover, unsaved_bytes
from ollama_tiering.store.remote_mover import of_shared_level
from ollama_tiering.store.report import (
    Leased,
    LeasedBlock,
    LeftOver,
    MatchedBlock,
    StoreReport,
    TierReport,
)
from ollama_tiering.store.session import WriteSession
from ollama_tiering.store.speed import measure_directory
from ollama_tiering.store.state import Doomed, StoreState
from ollama_tiering.store.tier import Tier

log = logging.getLogger(__name__)

_FLUSH_SECONDS: Final = 2.0
_IDLE_SECONDS: Final = 1.0
REMOVE_WAIT_SECONDS: Final = 1.0


class TieredStore:
    """Opened by the constructor (which scans the tiers), ended by `close`.

    `tiers` are (tier, budget in bytes), fastest first. With `background` a thread moves blocks;
    without, `run_pending` does, on the caller's time.
    """

    def __init__(
        self,
        tiers: Sequence[tuple[Tier, int]],
        *,
        index_path: Path | None = None,
        high_watermark: float = 0.95,
        low_watermark: float = 0.85,
        lease_seconds: float = 60.0,
        reserve_seconds: float = 120.0,
        staging_seconds: float = 5.0,
        rescan_seconds: float = 120.0,
        background: bool = True,
        measure: bool = True,
        codec: Codec | None = None,
        clock: Callable[[], float] = time.monotonic,
        wall_clock: Callable[[], float] = time.time,
    ) -> None:
        if not tiers:
            raise ValueError("a store needs a tier")
        self._state = StoreState(tiers, codec=codec, clock=clock, wall_clock=wall_clock)
        self._reserve_seconds = reserve_seconds
        self._index = BlockIndex(index_path) if index_path is not None else None
        self._sessions: set[WriteSession] = set()
        self._closed = False
        self._mover = Mover(self._state, high_watermark=high_watermark, low_watermark=low_watermark)
        self._leaser = Leaser(
            self._state,
            self._mover.copy,
            lease_seconds=lease_seconds,
            deadline_seconds=min(staging_seconds, lease_seconds),
        )
        rows = opening.load(self._state, self._index)
        self._shrink_to_budget()
        self._remote = of_shared_level(
            self._state,
            rows,
            period_seconds=rescan_seconds,
            high_watermark=high_watermark,
            low_watermark=low_watermark,
        )
        self._measure = measure
        self._thread: threading.Thread | None = None
        if background:
            self._thread = threading.Thread(target=self._run, name="block-mover", daemon=True)
            self._thread.start()
            if self._remote is not None:
                self._remote.start()

    # --- reading -------------------------------------------------------------------------------

    def match(
        self,
        namespace: NamespaceId,
        keys: Sequence[BlockKey],
        tokens: bytes,
        block_tokens: int,
    ) -> list[MatchedBlock]:
        """Leading run of whole blocks, then the best partly matching child. Counts as use."""
        return lookup.match(self._state, namespace, keys, tokens, block_tokens)

    def lease(self, namespace: NamespaceId, keys: Sequence[BlockKey]) -> Leased:
        """Pins the leading run of `keys` that is stored, until release or the lease's end.

        Blocks that have to be staged first are; what cannot be in time ends the run: a miss.
        """
        return self.begin_lease(namespace, keys).wait()

    def begin_lease(self, namespace: NamespaceId, keys: Sequence[BlockKey]) -> Leasing:
        """The same, for a holder that takes each block as it is ready."""
        return self._leaser.begin(namespace, keys)

    def release(self, lease_id: int) -> None:
        """Ends a lease; one that is over already is fine."""
        with self._state.lock:
            self._state.end_use(self._state.leases.close(lease_id))

    def read_part(self, block: LeasedBlock, offset: int, length: int) -> bytes:
        """Bytes of a leased block for a client that cannot open its file. OSError passes."""
        levels = self._state.levels
        tier = next(level.tier for level in levels if level.tier.kind is block.tier)
        with tier.open(block.namespace, block.key) as stored:
            return stored.read_at(offset, length)

    # --- writing -------------------------------------------------------------------------------

    def open_session(
        self,
        namespace: NamespaceId,
        fields: Sequence[tuple[str, str]],
        block_tokens: int,
    ) -> WriteSession:
        """A writer for one namespace. InvalidBlock when `fields` are not what it is made of."""
        if namespace_digest(fields) != namespace:
            raise InvalidBlock("the namespace is not the digest of its description")
        if dict(fields).get("block_tokens") != str(block_tokens):
            raise InvalidBlock(f"block_tokens {block_tokens} is not what the namespace says")
        rounded = self._state.codec.note(namespace, fields)
        for level in self._state.levels:
            if level.shared is not None:
                with self._state.lock:
                    level.shared.to_describe[namespace] = tuple(fields)
                continue
            try:
                level.tier.describe(namespace, fields)
            except OSError as error:
                log.warning("describe failed: tier=%s error=%s", level.tier.kind.label, error)
        session = WriteSession(
            self._state, namespace, block_tokens, self._reserve_seconds, rounded=rounded
        )
        self._sessions.add(session)
        return session

    def close_session(self, session: WriteSession) -> None:
        self._sessions.discard(session)
        session.close()

    def remove_seq(self, namespace: NamespaceId, keys: Sequence[BlockKey]) -> tuple[int, int]:
        """Drops the end of a chain up to what another sequence needs; (blocks, bytes) removed.

        A block that is just being written down is waited for; one that stays leased ends it.
        """
        removed = freed_bytes = 0
        deadline = time.monotonic() + REMOVE_WAIT_SECONDS
        while True:
            blocks, stored_bytes, pinned = self._remove_end(namespace, keys)
            removed, freed_bytes = removed + blocks, freed_bytes + stored_bytes
            if not pinned or time.monotonic() >= deadline:
                return removed, freed_bytes
            time.sleep(0.01)

    def _remove_end(
        self, namespace: NamespaceId, keys: Sequence[BlockKey]
    ) -> tuple[int, int, bool]:
        """Blocks and bytes removed, and whether a pinned block ended it."""
        state = self._state
        doomed: list[Doomed] = []
        removed = 0
        pinned = False
        with state.lock:
            state.expire()
            for key in reversed(keys):
                record = state.tree.get(key)
                if record is None or record.namespace != namespace:
                    continue
                pinned = state.pinned(key)
                if state.tree.child_count(key) or pinned:
                    break
                levels = [state.levels[index] for index in sorted(record.levels)]
                doomed += [d for level in levels if (d := state.drop_copy(level, key))]
                removed += 1
        room.unlink(state, doomed)
        return removed, sum(one.claim.reserved_bytes for one in doomed), pinned

    def report_corrupt(self, namespace: NamespaceId, key: BlockKey) -> bool:
        """Reads the block again; True when a copy of it was damaged and is quarantined now."""
        return damage.check(self._state, namespace, key)

    # --- the rest ------------------------------------------------------------------------------

    def report(self) -> StoreReport:
        state = self._state
        with state.lock:
            state.expire()
            tiers = [
                TierReport(
                    kind=level.tier.kind,
                    directory=level.tier.directory,
                    budget_bytes=level.lru.budget_bytes,
                    used_bytes=level.lru.used_bytes + level.lru.overhead_bytes,
                    reserved_bytes=level.lru.reserved_bytes,
                    blocks=len(level.lru),
                    stats=level.stats,
                    read_bytes_per_second=level.speed.read,
                    write_bytes_per_second=level.speed.write,
                    suspended=state.suspended(level),
                    encoding=state.codec.of(level).value,
                    raw_bytes=level.raw_bytes,
                    stored_bytes=level.lru.used_bytes,
                    resting_seconds=max(0.0, level.suspended_until - state.clock()),
                    shared=level.shared,
                )
                for level in state.levels
            ]
            return StoreReport(
                tiers,
                state.counters,
                len(state.leases),
                len(state.unsaved),
                state.codec.decoding.bytes_per_second,
                state.codec.rounded_namespaces(),
            )

    def run_pending(self, *, deadline: float | None = None) -> None:
        """Moves blocks until there is nothing to move or the (clock) deadline has passed."""
        while deadline is None or self._state.clock() < deadline:
            busy = self._mover.step()
            if self._remote is not None:
                busy = self._remote.step() or busy
            if not busy:
                return

    def flush_index(self) -> None:
        if self._index is not None:
            opening.save(self._state, self._index)

    def close(self, drain_seconds: float = 10.0) -> LeftOver:
        """Stops, writes down what it can in that time, and says what was left."""
        if self._closed:
            return LeftOver(0, 0)
        self._closed = True
        self._state.work.set()
        if self._thread is not None:
            self._thread.join()
        deadline = self._state.clock() + drain_seconds
        if self._remote is not None and not self._remote.finish(drain_seconds):
            self._remote = None
        for session in list(self._sessions):
            self.close_session(session)
        self._leaser.close()
        self.run_pending(deadline=deadline)
        left = LeftOver(*unsaved_bytes(self._state))
        self.flush_index()
        if self._index is not None:
            self._index.close()
        for level in self._state.levels:
            level.tier.close()
        return left

    def _run(self) -> None:
        state = self._state
        self._measure_speeds()
        flushed = state.clock()
        while not self._closed:
            try:
                busy = self._mover.step()
                now = state.clock()
                for session in list(self._sessions):
                    session.release_expired(now)
                if now - flushed >= _FLUSH_SECONDS:
                    self.flush_index()
                    flushed = now
            except Exception:  # the thread must outlive any bug in one piece of work
                log.exception("mover failed")
                busy = False
            if not busy:
                state.work.wait(_IDLE_SECONDS)
                state.work.clear()

    def _measure_speeds(self) -> None:
        if self._measure and self._state.codec.in_use:
            self._state.codec.measure()
        for level in self._state.levels if self._measure else ():
            directory = level.tier.directory
            if directory is None or level.speed.read or level.shared is not None:
                continue
            try:
                measure_directory(directory, level.speed, in_memory=level.tier.in_memory)
            except OSError as error:
                log.warning("not measured: tier=%s error=%s", level.tier.kind.label, error)

    def _shrink_to_budget(self) -> None:
        """A budget made smaller since the last run holds from the start."""
        for level in self._state.levels:
            with self._state.lock:
                doomed = self._state.take_victims(level, level.lru.excess_bytes)
            room.unlink(self._state, doomed)
