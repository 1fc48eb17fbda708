"""Copies of blocks that come, go, or turn out to be of no use. Each verb takes the lock.

What is to be done on the disk is handed out (`Doomed`) and reported back (`gone`).
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from ollama_tiering.store.block.key import BlockKey, NamespaceId
from ollama_tiering.store.books.lru import Reservation
from ollama_tiering.store.books.state import Doomed, Level, StoreState
from ollama_tiering.store.books.tree import BlockRecord


@dataclass(frozen=True, slots=True)
class CopiedFile:
    """A file that was written from another tier's."""

    file_bytes: int
    stored_bytes: int  # physical
    encoded: bool
    write_seconds: float
    read_bytes: int
    read_seconds: float


@contextlib.contextmanager
def held(state: StoreState, *keys: BlockKey) -> Iterator[None]:
    """Blocks that are not evicted meanwhile, stored or not."""
    hold(state, keys)
    try:
        yield
    finally:
        let_go(state, keys)


def hold(state: StoreState, keys: Sequence[BlockKey]) -> None:
    with state.lock:
        for key in keys:
            state.hold(key)


def let_go(state: StoreState, keys: Sequence[BlockKey]) -> None:
    with state.lock:
        for key in keys:
            state.let_go(key)


def in_reach(
    state: StoreState, namespace: NamespaceId, key: BlockKey
) -> tuple[BlockRecord, list[Level]] | None:
    """The block with the levels it can be had from now, held until `let_go`. None: not stored."""
    with state.lock:
        record = state.tree.get(key)
        if record is None or record.namespace != namespace:
            return None
        reached = record.levels.difference(state.resting())
        state.hold(key)
        return record, [state.levels[index] for index in sorted(reached)]


def drop_parted(state: StoreState, record: BlockRecord, others: Sequence[BlockKey]) -> list[Doomed]:
    """Every copy of the end of a window if one of its other blocks is in no tier, and nobody writes
    it; nothing otherwise, or where somebody reads the end. One hold: the others may come at any
    time. A person's pin is no reason to keep it: it keeps what comes anew.
    """
    with state.lock:
        if state.tree.get(record.key) is not record or state.held(record.key):
            return []
        if not all(level.known for level in state.levels):
            return []  # the others may lie where nobody has looked yet
        if all(other in state.tree or other in state.writing for other in others):
            return []
        levels = [state.levels[index] for index in sorted(record.levels)]
        return [one for level in levels if (one := state.drop_copy(level, record.key))]


def gone(state: StoreState, doomed: Doomed, *, unlinked: bool) -> None:
    """Its file is unlinked, or could not be and stays counted."""
    with state.lock:
        state.gone(doomed, unlinked=unlinked)
        state.count_overhead(doomed.level)


def is_leaving(state: StoreState, level: Level, key: BlockKey) -> bool:
    """Whether a copy there is out of the books, and its file not yet unlinked."""
    with state.lock:
        return state.is_leaving(level, key)


def left_to_its_thread(state: StoreState, doomed: Doomed) -> bool:
    """A shared tier's own thread removes the file: nobody else may wait for it. False: it is to be
    removed by the caller.
    """
    shared = doomed.level.shared
    if shared is None:
        return False
    with state.lock:
        shared.doomed.setdefault((doomed.namespace, doomed.key), None)
        state.gone(doomed, unlinked=True)
    return True


def forget(state: StoreState, level: Level, key: BlockKey, *, miss: str = "") -> None:
    """The file of a copy is gone already; `miss` counts why somebody did not get it."""
    with state.lock:
        state.forget_copy(level, key)
        if miss:
            state.counters.miss(miss)


def quarantined(state: StoreState, level: Level, key: BlockKey) -> None:
    """A damaged copy was put out of the way."""
    with state.lock:
        level.stats.quarantined_blocks += 1
        state.counters.miss("corrupt")
        state.forget_copy(level, key)
        state.count_overhead(level)


def set_aside(state: StoreState, level: Level, key: BlockKey) -> None:
    """A copy that cannot be used here; its file stays and its bytes count."""
    with state.lock:
        if level.shared is not None:
            level.shared.passed_over[key] = None
        doomed = state.drop_copy(level, key)
        if doomed:
            state.gone(doomed, unlinked=False)


def note_unusable(state: StoreState, level: Level, *, foreign: bool) -> bool:
    """Counts it; whether one that is not authentic was said before."""
    with state.lock:
        state.counters.miss("not authentic" if foreign else "unknown format")
        said, level.said_not_authentic = level.said_not_authentic, foreign
        level.said_not_authentic |= said
        return said


def correct_size(
    state: StoreState, record: BlockRecord, level: Level, file_bytes: int, raw_file_bytes: int
) -> None:
    """The header of a file says another size than the books: the file is right."""
    with state.lock:
        state.correct_size(record, level, file_bytes, raw_file_bytes)


def recount(state: StoreState, level: Level) -> None:
    """Files that are no blocks came or went."""
    with state.lock:
        state.count_overhead(level)


def copied(
    state: StoreState,
    record: BlockRecord,
    source: Level,
    target: Level,
    reservation: Reservation[BlockKey],
    file: CopiedFile,
) -> None:
    """A copy is in its place and named: it is in the books from now on."""
    with state.lock:
        reservation.commit(record.key, file.stored_bytes)
        if target.shared is not None:
            took_bytes = max(file.file_bytes, file.stored_bytes)
            target.shared.took_less(reservation.reserved_bytes, took_bytes)
        if file.encoded:
            record.encoded[target.index] = file.file_bytes
        state.add_copy(record, target, file.stored_bytes)
        state.count_overhead(target)
        state.worked(target)
        target.wrote(record.namespace, file.stored_bytes)
        target.stats.write_seconds += file.write_seconds
        source.stats.read_bytes += file.read_bytes
        source.stats.read_seconds += file.read_seconds
