"""Moves blocks between neighbouring tiers: write down, promote, trim to the low watermark. Evicts
what a lowered budget, the free-space floor or old age wants gone.

`step` does one piece of work and may be driven by a thread or by a test. No OSError leaves it, none
deletes anything; a damaged source is quarantined.
"""

from __future__ import annotations

import itertools
import logging
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Final, TypeVar

from ollama_tiering.store.block.key import BlockKey
from ollama_tiering.store.books.covering import take_covered
from ollama_tiering.store.books.lru import Reservation
from ollama_tiering.store.books.state import Level, StoreState
from ollama_tiering.store.books.tree import BlockRecord
from ollama_tiering.store.tiers.contract import TierKind
from ollama_tiering.store.upkeep import room, shares
from ollama_tiering.store.upkeep.copying import Copier, Failure, Filled
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


@dataclass(frozen=True, slots=True)
class Job:
    """A block to be written down: one that waits, or one before it that must be there first."""

    key: BlockKey  # the one that waits
    record: BlockRecord
    source: Level
    target: Level


class Mover:
    """Not thread-safe: one driver at a time."""

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
            or self.promote_one()
            or self.write_down()
        )

    def give_way(self) -> bool:
        """Back to the budgets at once, back to the free-space floor and past old age now and then.

        Only now and then: where others fill the disk, or a client still has an evicted file open,
        evicting more would not free more.
        """
        state = self._state
        moved = [room.shrink(state, level) for level in state.levels]
        own = [level for level in state.levels if level.shared is None]
        if state.terms.with_budget:
            moved += [shares.shrink(state, level) for level in own]
        if state.early:
            moved.append(self._drop_early())
        now = state.clock()
        if not 0 <= now - self._gave_back < _GIVE_BACK_SECONDS:
            self._gave_back = now
            moved += [room.give_back(state, level) for level in state.levels]
            moved.append(self._expiry.run(state, own))
        return any(moved)

    def sample(self) -> bool:
        """Times a short read of a block that a client is about to read, if it is still on the disk.

        The client has the path and reads without the sidecar: this is what the disk gives then.
        """
        state = self._state
        with state.lock:
            record = state.tree.get(state.to_sample.pop()) if state.to_sample else None
            if record is None or not record.levels:
                return False
            level = state.levels[min(record.levels)]
            if level.shared is not None:
                return True  # it is copied up before a client reads it, and timed then
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
        state = self._state
        with state.lock:
            failed = [key for key in state.early if key not in state.writing]
            doomed = [one for key in failed for one in state.drop_early(key)]
        room.unlink(state, doomed)
        return bool(doomed)

    def trim(self) -> bool:
        """Empties a tier with one below it from the high to the low watermark.

        Once begun it goes on over several steps: what is not written down yet has to be first.
        """
        state = self._state
        trimmed = False
        for level in state.levels[:-1]:
            budget = level.lru.budget_bytes
            with state.lock:
                below = state.below(level)
                if below is not None and below.shared is not None and state.suspended(below):
                    continue  # out of reach: this level goes on as the last, and fills up
                if level.lru.claimed_bytes > self._high * budget:
                    self._trimming.add(level.index)
                surplus = level.lru.claimed_bytes - int(self._low * budget)
                if surplus <= 0:
                    self._trimming.discard(level.index)
                if level.index not in self._trimming:
                    continue
                doomed = state.take_victims(level, surplus, partial=True)
                state.admission.press(level, surplus - sum(d.claim.reserved_bytes for d in doomed))
            room.unlink(state, doomed)
            trimmed = trimmed or bool(doomed)
        return trimmed

    def drain(self, deadline: float) -> None:
        """Writes down what is wanted on disk until the (clock) deadline; nothing else."""
        state = self._state
        while state.clock() < deadline:
            with state.lock:
                state.unsaved.hurry()
            if not self.write_down():
                break
        self.sync_names()

    def write_down(self) -> bool:
        """Copies the blocks that wait longest one tier down, a few at once; they stay above until
        trimmed.
        """
        state = self._state
        with state.lock:
            jobs, settled = self._jobs()
            # The block before each too: making room must not evict what makes it worth having.
            held = [key for job in jobs for key in (job.record.key, BlockKey(job.record.parent))]
            for key in held:
                state.pin(key)
        try:
            done, failure = self._write(jobs) if jobs else (0, None)
        finally:
            with state.lock:
                for key in held:
                    state.unpin(key)
        for job in jobs[:done]:
            self._to_sync.setdefault(job.target.index, []).append(job.record)
        if not jobs or not 0 <= state.clock() - self._synced < _SYNC_SECONDS:
            self.sync_names()
        with state.lock:
            for job in jobs[:done]:
                state.unsaved.discard(job.record.key)
            for job in jobs[done : done + 1]:  # those after it were not tried
                if failure in (Failure.NO_ROOM, Failure.NOT_TODAY):  # RAM may evict them now
                    full = failure is Failure.NO_ROOM
                    refuse = state.admission.no_room if full else state.admission.not_now
                    refuse(job.key, job.record.key)
                    return True
                state.unsaved.defer(job.record.key)
                state.unsaved.defer(job.key)
                # Damaged or gone: that much is settled.
                settled = settled or job.source.index not in job.record.levels
        return settled or done > 0

    def _jobs(self) -> tuple[list[Job], bool]:
        """What to write down now, parents first; whether the queue became shorter. Lock held."""
        state = self._state
        jobs: dict[BlockKey, Job] = {}
        settled = False
        if not len(state.unsaved):
            return [], state.admission.refill()
        batch_bytes = 0
        for key in state.unsaved.ready(state.clock(), _BATCH_BLOCKS):
            record = state.tree.get(key)
            if record is None or state.terms.of(record.namespace).refusal:
                state.unsaved.discard(key)
                settled = True
                continue
            source = state.levels[min(record.levels)]
            target = state.below(source)
            if target is not None and target.shared is not None and source.index == 0:
                break  # the shared tier's own mover does it
            if (
                target is None
                or target.index in record.levels
                or source.index > 0
                # It can live in the tier above only.
                or record.file_bytes + target.tier.growth_bytes > target.lru.budget_bytes
            ):
                state.unsaved.discard(key)
                settled = True
                continue
            if not state.waits_for(target) or state.suspended(source):
                break
            for one in self._missing(record, source, target):
                if one.key in jobs:
                    continue
                batch_bytes += one.file_bytes
                if len(jobs) == _BATCH_BLOCKS or (
                    len(jobs) >= _WRITES_AT_ONCE and batch_bytes > _BATCH_BYTES
                ):
                    return list(jobs.values()), settled
                jobs[one.key] = Job(key, one, source, target)
        return list(jobs.values()), settled

    def _missing(self, record: BlockRecord, source: Level, target: Level) -> list[BlockRecord]:
        """The block itself after those before it that the tier below lacks: a chain has no
        holes.
        """
        missing = [record]
        for before in self._state.tree.ancestors(record.parent):
            if source.index not in before.levels or max(before.levels) >= target.index:
                break
            missing.append(before)
        return missing[::-1]

    def _write(self, jobs: Sequence[Job]) -> tuple[int, Failure | None]:
        """(how many, from the first on, are down; why the first is not, if that was plain before
        anything was written).
        """
        claims: list[Reservation[BlockKey]] = []
        for job in jobs:
            claim = self._copier.reserve(job.record, job.target)
            if isinstance(claim, Failure):
                if not claims:
                    return 0, claim
                break  # those before it may have taken what it needs: it is tried again
            claims.append(claim)
        begin = time.perf_counter()
        filled = self._fill(jobs, claims)
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
        self, jobs: Sequence[Job], claims: Sequence[Reservation[BlockKey]]
    ) -> list[Filled | None]:
        """Several files at once: while the disk writes one another is read."""

        def fill(job: Job, claim: Reservation[BlockKey]) -> Filled | None:
            filled = self._copier.fill(job.record, job.source, job.target, claim, Seconds())
            return None if isinstance(filled, Failure) else filled

        return self._each(fill, jobs, claims)

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
                with state.lock:
                    state.failed(level, error, "sync")
                continue  # tried again when the tier is
            for record in self._to_sync.pop(level.index):
                with state.lock:
                    there = level.index in record.levels
                    doomed = take_covered(state, record, level.index) if there else []
                room.unlink(state, doomed)

    def close(self) -> None:
        self._threads.close()

    def promote_one(self) -> bool:
        """Copies a block that was asked for into RAM if that has room without evicting anything."""
        state = self._state
        with state.lock:
            if not state.promotable:
                return False
            key, _ = state.promotable.popitem(last=False)
            record = state.tree.get(key)
            top = state.levels[0]
            if record is None or not record.levels or top.index in record.levels:
                return True
            if key in state.staging:
                return True
            source = state.levels[min(record.levels)]
            if source.shared is not None:
                return True  # it was copied up when it was asked for, or could not be
            after = top.lru.claimed_bytes + record.file_bytes + top.tier.growth_bytes
            if after > self._low * top.lru.budget_bytes or state.suspended(top):
                return True
            state.pin(key)
            state.staging[key] = threading.Event()
        try:
            if self._copier.copy(record, source, top):
                with state.lock:
                    top.stats.promoted_blocks += 1
        finally:
            with state.lock:
                state.unpin(key)
                done = state.staging.pop(key)
            done.set()
        return True


def only_in_ram(state: StoreState) -> tuple[int, int]:
    """(blocks, bytes) that no disk holds: they do not outlive a reboot. Takes the lock."""
    with state.lock:
        top = state.levels[0]
        if len(state.levels) == 1 or (not top.tier.in_memory and top.tier.kind is not TierKind.RAM):
            return 0, 0
        records = [state.tree.get(key) for key in top.lru]
        sizes = [r.file_bytes for r in records if r is not None and len(r.levels) == 1]
    return len(sizes), sum(sizes)
