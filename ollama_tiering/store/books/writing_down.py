"""What is to be written a level down, and what came of it. Each verb takes the lock."""

from __future__ import annotations

import enum
from dataclasses import dataclass

from ollama_tiering.store.block.key import BlockKey
from ollama_tiering.store.books.covering import take_covered
from ollama_tiering.store.books.state import Doomed, Level, StoreState
from ollama_tiering.store.books.tree import BlockRecord


@dataclass(frozen=True, slots=True)
class Job:
    """A block to be written down: one that waits, or one before it that must be there first."""

    key: BlockKey  # the one that waits
    record: BlockRecord
    source: Level
    target: Level


class Failure(enum.Enum):
    """Why a block was not copied."""

    NO_ROOM = enum.auto()  # the tier may evict nothing for it, and takes blocks otherwise
    NOT_TODAY = enum.auto()  # the day's budget of writes does not reach for it
    OTHER = enum.auto()  # not now, or not there any more: the books say why


@dataclass(frozen=True, slots=True)
class Batch:
    jobs: list[Job]  # parents first
    settled: bool  # the queue became shorter without them
    held: list[BlockKey]  # to be let go when they are down


def next_batch(state: StoreState, most_blocks: int, at_once: int, most_bytes: int) -> Batch:
    """The blocks that wait longest, at most `most_blocks`, and more than `at_once` only while they
    have few bytes.
    """
    with state.lock:
        jobs, settled = _jobs(state, most_blocks, at_once, most_bytes)
        # The block before each too: making room must not evict what makes it worth having.
        held = [key for job in jobs for key in (job.record.key, BlockKey(job.record.parent))]
        for key in held:
            state.hold(key)
        return Batch(jobs, settled, held)


def written(state: StoreState, batch: Batch, done: int, failure: Failure | None) -> bool:
    """The first `done` are down; `failure`: why the next one is not, if that was plain before
    anything was written. Whether the queue became shorter.
    """
    jobs, settled = batch.jobs, batch.settled
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


def hurry(state: StoreState) -> None:
    """What waits for a longer block waits no more."""
    with state.lock:
        state.unsaved.hurry()


def covered(state: StoreState, level: Level, record: BlockRecord) -> list[Doomed]:
    """Shorter blocks that this one, durable on the level now, makes needless."""
    with state.lock:
        return take_covered(state, record, level.index) if level.index in record.levels else []


def without_parents(state: StoreState) -> list[Doomed]:
    """Blocks whose parent was not stored after all, and that were in use when that was seen."""
    with state.lock:
        failed = [key for key in state.early if key not in state.writing]
        return [one for key in failed for one in state.drop_early(key)]


def trim(
    state: StoreState, level: Level, high: float, low: float, trimming: set[int]
) -> list[Doomed]:
    """What leaves a level with one below it so that it comes from the high to the low watermark;
    `trimming` are levels that are on their way.
    """
    budget = level.lru.budget_bytes
    with state.lock:
        below = state.below(level)
        if below is not None and below.shared is not None and state.suspended(below):
            return []  # out of reach: this level goes on as the last, and fills up
        if level.lru.counted_bytes > high * budget:
            trimming.add(level.index)
        surplus = level.lru.counted_bytes - int(low * budget)
        if surplus <= 0:
            trimming.discard(level.index)
        if level.index not in trimming:
            return []
        doomed = state.take_victims(level, surplus, partial=True)
        state.admission.press(level, surplus - sum(d.reservation.reserved_bytes for d in doomed))
        return doomed


def only_in_ram(state: StoreState) -> tuple[int, int]:
    """(blocks, bytes) that no disk holds: they do not outlive a reboot."""
    with state.lock:
        top = state.levels[0]
        if len(state.levels) == 1 or not (top.tier.in_memory or top.tier.is_volatile):
            return 0, 0
        records = [state.tree.get(key) for key in top.lru]
        sizes = [r.file_bytes for r in records if r is not None and len(r.levels) == 1]
    return len(sizes), sum(sizes)


def _jobs(
    state: StoreState, most_blocks: int, at_once: int, most_bytes: int
) -> tuple[list[Job], bool]:
    """What to write down now, parents first; whether the queue became shorter."""
    jobs: dict[BlockKey, Job] = {}
    settled = False
    if not len(state.unsaved):
        return [], state.admission.refill()
    batch_bytes = 0
    for key in state.unsaved.ready(state.clock(), most_blocks):
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
        for one in _missing(state, record, source, target):
            if one.key in jobs:
                continue
            batch_bytes += one.file_bytes
            if len(jobs) == most_blocks or (len(jobs) >= at_once and batch_bytes > most_bytes):
                return list(jobs.values()), settled
            jobs[one.key] = Job(key, one, source, target)
    return list(jobs.values()), settled


def _missing(
    state: StoreState, record: BlockRecord, source: Level, target: Level
) -> list[BlockRecord]:
    """The block itself after those before it that the tier below lacks: a chain has no holes."""
    missing = [record]
    for before in state.tree.ancestors(record.parent):
        if source.index not in before.levels or max(before.levels) >= target.index:
            break
        missing.append(before)
    return missing[::-1]
