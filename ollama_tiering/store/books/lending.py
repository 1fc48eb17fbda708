"""Blocks that a client reads: leased, used, let go; and those copied for it first. Each verb
takes the lock, for a bounded number of blocks: the caller asks for more in further calls.
"""

from __future__ import annotations

import threading
from collections.abc import Sequence

from ollama_tiering.store.block.key import BlockKey, NamespaceId
from ollama_tiering.store.books.report import LeasedBlock
from ollama_tiering.store.books.state import Level, StoreState
from ollama_tiering.store.books.tree import BlockRecord


def open_lease(state: StoreState, seconds: float) -> int:
    """Opens a lease of nothing yet. NoRoom when too many are open."""
    with state.lock:
        state.expire()
        state.leases.check_room(0)
        return state.leases.open((), state.clock() + seconds)


def lend(
    state: StoreState, lease_id: int, namespace: NamespaceId, keys: Sequence[BlockKey]
) -> list[BlockRecord]:
    """The leading run of `keys` that is stored, now the lease's. NoRoom when too much is leased."""
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
            state.hold(key)
    return records


def used(state: StoreState, records: Sequence[BlockRecord]) -> None:
    """Notes a use. For a window block this is the hit: the look-up before was one of its chain
    only, and no prompt matches it. So it is protected as the chain is, and worth the disk.
    """
    with state.lock:
        state.touch(reversed(records))
        windows = [record for record in reversed(records) if record.window]
        if windows:
            state.touch(windows, hit=True)
            for window in windows:
                state.admission.used((window,))


def renew_lease(state: StoreState, lease_id: int, seconds: float) -> bool:
    """Renews it from now on. False when it is over already."""
    with state.lock:
        return state.leases.renew(lease_id, state.clock() + seconds)


def close_lease(state: StoreState, lease_id: int) -> list[BlockKey]:
    """What it held, for `end_use`; nothing when it is over already."""
    with state.lock:
        return list(state.leases.close(lease_id))


def end_use(state: StoreState, keys: Sequence[BlockKey]) -> None:
    with state.lock:
        state.end_use(keys)


def served(state: StoreState, ready: Sequence[LeasedBlock], samples: int) -> None:
    """Blocks that were named to a client; `samples` of those on a disk are to be timed."""
    with state.lock:
        state.counters.get_blocks += len(ready)
        state.counters.get_bytes += sum(block.file_bytes for block in ready)
        state.count_served((block.tier, block.file_bytes) for block in ready)
        volatile = {level.tier.kind for level in state.levels if level.tier.is_volatile}
        cold = [block.key for block in ready if block.tier not in volatile]
        if cold:
            # The last ones: the client has not read them when they are looked at.
            state.to_sample = cold[-samples:]
            state.work.set()


def can_be_staged(state: StoreState, record: BlockRecord) -> bool:
    """Whether any copy can be tried now."""
    with state.lock:
        return state.tree.get(record.key) is record and state.reachable(record) is not None


def ways_to_stage(state: StoreState, record: BlockRecord) -> tuple[list[Level], list[Level]]:
    """Says where from, the soonest first; where to, so that a client can read it as it is. Nowhere
    while a writer fills it.
    """
    with state.lock:
        if record.key in state.writing:
            return [], []
        sources = [state.levels[index] for index in state.soonest_first(record)]
        targets = [
            level
            for level in state.levels
            if level.tier.clients_open
            and level.index not in record.levels
            and state.encodings.keeps_raw(level, record.namespace)
            and not state.suspended(level)
        ]
        return sources, targets


def staged(state: StoreState, record: BlockRecord, target: Level) -> None:
    """A copy was made there for a client."""
    with state.lock:
        target.stats.promoted_blocks += 1
        state.counters.get_blocks += 1
        state.counters.get_bytes += record.file_bytes
        state.count_served([(target.tier.kind, record.file_bytes)])


def begin_staging(state: StoreState, key: BlockKey) -> threading.Event | None:
    """`None`: it is the caller's to stage, and held until `end_staging`. Else another one does; the
    event tells when it is done.
    """
    with state.lock:
        running = state.staging.get(key)
        if running is None:
            state.staging[key] = threading.Event()
            state.hold(key)
        return running


def end_staging(state: StoreState, key: BlockKey) -> None:
    with state.lock:
        state.let_go(key)
        done = state.staging.pop(key)
    done.set()


def next_sample(state: StoreState) -> tuple[BlockRecord, Level] | bool:
    """A block that a client is about to read from a disk, and the level; else whether there may be
    another one.
    """
    with state.lock:
        record = state.tree.get(state.to_sample.pop()) if state.to_sample else None
        if record is None or not record.levels:
            return False
        level = state.levels[min(record.levels)]
        if not level.tier.clients_open:
            return True  # it is copied up before a client reads it, and timed then
        return record, level


def next_promotion(state: StoreState, low: float) -> tuple[BlockRecord, Level] | bool:
    """A block that was asked for, and the level to copy it from into the first, which has room
    below its low watermark; held until `end_staging`. Else whether there may be another one now.
    """
    with state.lock:
        key, due = next(iter(state.promotable.items()), (None, 0.0))
        if key is None or state.clock() < due:
            return False
        state.promotable.pop(key)
        record = state.tree.get(key)
        top = state.levels[0]
        if record is None or not record.levels or top.index in record.levels:
            return True
        if key in state.staging or state.held(key):
            return True  # leased again: the end of that use names it again
        source = state.levels[min(record.levels)]
        if not source.tier.clients_open:
            return True  # it was copied up when it was asked for, or could not be
        after = top.lru.counted_bytes + record.file_bytes + top.tier.growth_bytes
        if after > low * top.lru.budget_bytes or state.suspended(top):
            return True
        state.hold(key)
        state.staging[key] = threading.Event()
        return record, source


def promoted(state: StoreState) -> None:
    """A block was copied into the first level."""
    with state.lock:
        state.levels[0].stats.promoted_blocks += 1
