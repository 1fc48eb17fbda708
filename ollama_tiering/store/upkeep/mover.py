"""Moves blocks between neighbouring tiers: write down, promote, trim to the low watermark. Evicts
what a lowered budget, the free-space floor or old age wants gone.

`step` does one piece of work and may be driven by a thread or by a test. No OSError leaves it, none
deletes anything; a damaged source is quarantined.
"""

from __future__ import annotations

import itertools
import logging
import time
from collections.abc import Callable, Sequence
from typing import Any, Final, TypeVar

from ollama_tiering.store.block.key import BlockKey
from ollama_tiering.store.books import copies, lending, weather, writing_down
from ollama_tiering.store.books.lru import Reservation
from ollama_tiering.store.books.state import StoreState
from ollama_tiering.store.books.tree import BlockRecord
from ollama_tiering.store.books.writing_down import Failure, Job
from ollama_tiering.store.upkeep import chain_check, making_room, unlinking
from ollama_tiering.store.upkeep.copying import Copier, Filled
from ollama_tiering.store.upkeep.expiry import Expiry
from ollama_tiering.store.upkeep.transcode import Seconds
from ollama_tiering.system.daemon_pool import DaemonPool

T = TypeVar("T")

log = logging.getLogger(__name__)

_PART_BYTES: Final = 1 << 20
_GIVE_BACK_SECONDS: Final = 10.0
_WRITES_AT_ONCE: Final = 4  # threads
_BATCH_BYTES: Final = 32 << 20  # made durable together, but at least as many blocks as threads
_BATCH_BLOCKS: Final = 32
_SYNC_SECONDS: Final = 2.0  # a name may not be durable for so long, while more are to come


class Mover:
    """Is not thread-safe: one driver at a time."""

    def __init__(self, state: StoreState, *, high_watermark: float, low_watermark: float) -> None:
        self._state = state
        self._high = high_watermark
        self._low = low_watermark
        self._trimming: set[int] = set()  # levels on their way from high to low
        self._copier = Copier(state)
        self.copy = self._copier.copy
        self._threads = DaemonPool(_WRITES_AT_ONCE, "write-down")
        self._gave_back = state.clock()
        # Level -> blocks whose names are not durable yet. At first also those a scan found.
        self._to_sync: dict[int, list[BlockRecord]] = {
            level.index: [] for level in state.levels if level.shared is None
        }
        self._synced = state.clock()
        self._expiry = Expiry(state.clock, state.wall_clock)

    def set_watermarks(self, high: float, low: float) -> None:
        self._high, self._low = high, low

    def step(self) -> bool:
        """The most urgent piece of work; False when there is none that could be done now."""
        return (
            self.sample()
            or self.give_way()
            or self.trim()
            or chain_check.step(self._state)
            or self.promote_one()
            or self.write_down()
        )

    def give_way(self) -> bool:
        """Back to the budgets at once, back to the free-space floor and past old age now and then.

        Only now and then: where others fill the disk, or a client still has an evicted file open,
        evicting more would not free more.
        """
        state = self._state
        moved = [making_room.shrink(state, level) for level in state.levels]
        own = [level for level in state.levels if level.shared is None]
        if state.terms.with_budget:
            moved += [making_room.shrink_models(state, level) for level in own]
        if state.early:
            moved.append(self._drop_early())
        now = state.clock()
        if not 0 <= now - self._gave_back < _GIVE_BACK_SECONDS:
            self._gave_back = now
            moved += [making_room.give_back(state, level) for level in state.levels]
            moved.append(self._expiry.run(state, own))
        return any(moved)

    def sample(self) -> bool:
        """Times a short read of a block that a client is about to read, if it is still on the disk.

        The client has the path and reads without the sidecar: this is what the disk gives then.
        """
        found = lending.next_sample(self._state)
        if isinstance(found, bool):
            return found
        record, level = found
        try:
            with level.tier.open(record.namespace, record.key) as block:
                if level.speed.counts(block):
                    length = min(_PART_BYTES, block.file_bytes)
                    start = time.perf_counter()
                    block.read_at(block.file_bytes - length, length)
                    level.speed.add_read(length, time.perf_counter() - start)
        except OSError as error:
            log.debug("not sampled: key=%s error=%s", record.key.hex(), error)
        return True

    def _drop_early(self) -> bool:
        """Blocks whose parent was not stored after all, and that were in use when that was seen."""
        doomed = writing_down.without_parents(self._state)
        unlinking.unlink(self._state, doomed)
        return bool(doomed)

    def trim(self) -> bool:
        """Empties a tier with one below it from the high to the low watermark.

        Once begun it goes on over several steps: what is not written down yet has to be first.
        """
        state = self._state
        trimmed = False
        for level in state.levels[:-1]:
            doomed = writing_down.trim(state, level, self._high, self._low, self._trimming)
            unlinking.unlink(state, doomed)
            trimmed = trimmed or bool(doomed)
        return trimmed

    def drain(self, deadline: float) -> None:
        """Writes down what is wanted on disk until the (clock) deadline; nothing else."""
        state = self._state
        while state.clock() < deadline:
            writing_down.hurry(state)
            if not self.write_down():
                break
        self.sync_names()

    def write_down(self) -> bool:
        """Copies the blocks that wait longest one tier down, a few at once; they stay above until
        trimmed.
        """
        state = self._state
        batch = writing_down.next_batch(state, _BATCH_BLOCKS, _WRITES_AT_ONCE, _BATCH_BYTES)
        jobs = batch.jobs
        try:
            done, failure = self._write(jobs) if jobs else (0, None)
        finally:
            copies.let_go(state, batch.held)
        for job in jobs[:done]:
            self._to_sync.setdefault(job.target.index, []).append(job.record)
        if not jobs or not 0 <= state.clock() - self._synced < _SYNC_SECONDS:
            self.sync_names()
        return writing_down.written(state, batch, done, failure)

    def _write(self, jobs: Sequence[Job]) -> tuple[int, Failure | None]:
        """(how many, from the first on, are down; why the first is not, if that was plain before
        anything was written).
        """
        reservations: list[Reservation[BlockKey]] = []
        for job in jobs:
            reservation = self._copier.reserve(job.record, job.target)
            if isinstance(reservation, Failure):
                if not reservations:
                    return 0, reservation
                break  # those before it may have taken what it needs: it is tried again
            reservations.append(reservation)
        begin = time.perf_counter()
        filled = self._fill(jobs, reservations)
        batch = [one for one in itertools.takewhile(lambda one: one is not None, filled) if one]
        sealed = self._each(self._copier.seal, batch)
        good = len(list(itertools.takewhile(bool, sealed)))
        self._copier.discard([*batch[good:], *(one for one in filled[len(batch) :] if one)])
        done = self._copier.publish(batch[:good])
        seconds = time.perf_counter() - begin
        if done:
            jobs[0].target.speed.add_write(sum(one.file_bytes for one in batch[:done]), seconds)
        return done, None

    def _fill(
        self, jobs: Sequence[Job], reservations: Sequence[Reservation[BlockKey]]
    ) -> list[Filled | None]:
        """Several files at once: while the disk writes one another is read."""

        def fill(job: Job, reservation: Reservation[BlockKey]) -> Filled | None:
            filled = self._copier.fill(job.record, job.source, job.target, reservation, Seconds())
            return None if isinstance(filled, Failure) else filled

        return self._each(fill, jobs, reservations)

    def _each(self, call: Callable[..., T], *of: Sequence[Any]) -> list[T]:
        """`map`, in the threads unless there is only one."""
        if min(map(len, of)) < 2:
            return list(map(call, *of))
        return list(self._threads.map(call, *of))

    def sync_names(self) -> None:
        """A power cut costs what was named since; a block that is lost is a miss. Only now may the
        shorter ones go that it covers.
        """
        state = self._state
        self._synced = state.clock()
        for level in [state.levels[index] for index in self._to_sync]:
            if state.suspended(level) or not level.surveyed:
                continue
            try:
                level.tier.sync_names()
            except OSError as error:
                weather.failed(state, level, error, "sync")
                continue  # tried again when the tier is
            for record in self._to_sync.pop(level.index):
                unlinking.unlink(state, writing_down.covered(state, level, record))

    def close(self) -> None:
        self._threads.close()

    def promote_one(self) -> bool:
        """Copies a block that was asked for into RAM if that has room without evicting anything."""
        state = self._state
        found = lending.next_promotion(state, self._low)
        if isinstance(found, bool):
            return found
        record, source = found
        try:
            if self._copier.copy(record, source, state.levels[0]):
                lending.promoted(state)
        finally:
            lending.end_staging(state, record.key)
        return True
