"""Blocks on their way in: reserved by a writer, filled, entered or given up.

Each verb takes the lock.
"""

from __future__ import annotations

import enum
from collections.abc import Iterable

from ollama_tiering.store.block.key import BlockKey
from ollama_tiering.store.books.covering import note_turn, take_covered
from ollama_tiering.store.books.lru import Reservation
from ollama_tiering.store.books.state import Doomed, Level, StoreState
from ollama_tiering.store.books.tree import BlockRecord


class OfferAnswer(enum.Enum):
    """Answers a writer that has a block."""

    WANTED = enum.auto()  # it is the writer's to fill, until `entered` or `given_up`
    PRESENT = enum.auto()  # stored, or another writer fills it
    LEAVING = enum.auto()  # a file of its name is just being unlinked, or copied up


def begin(
    state: StoreState, key: BlockKey, parent: bytes, open_of_writer: int
) -> OfferAnswer | str:
    """Whether the block is wanted, or why the writer may not have more open. What comes before it
    is held meanwhile, and so is the block: nobody begins to unlink what the writer names.
    """
    with state.lock:
        record = state.tree.get(key)
        # What only a tier out of reach holds is stored anew: for now it is not there.
        there = record is not None and _there(state, record)
        if there or key in state.writing:
            if record is not None:
                state.touch(state.tree.ancestors(key))
            return OfferAnswer.PRESENT
        if key in state.staging or any(state.is_leaving(level, key) for level in state.levels):
            return OfferAnswer.LEAVING
        if full := state.admission.reservations_full(open_of_writer):
            return full
        state.writing.add(key)
        state.hold(key)
        state.hold(BlockKey(parent))
        return OfferAnswer.WANTED


def end(state: StoreState, key: BlockKey, parent: bytes) -> None:
    """The block was wanted, and is not filled after all."""
    with state.lock:
        _let_go(state, key, parent)


def given_up(
    state: StoreState,
    level: Level,
    key: BlockKey,
    parent: bytes,
    reservation: Reservation[BlockKey],
) -> list[Doomed]:
    """Its file is discarded; what was stored on top of it meanwhile goes, too. From here on the
    block is any other writer's to begin.
    """
    with state.lock:
        reservation.release()
        _let_go(state, key, parent)
        doomed = state.drop_early(key)
        state.count_overhead(level)
        return doomed


def is_stored(state: StoreState, key: BlockKey) -> bool:
    with state.lock:
        return key in state.tree


def standing(state: StoreState, record: BlockRecord) -> tuple[bool, bool]:
    """Whether a longer block has all of its rows; whether the block before it is there, or on its
    way.
    """
    with state.lock:
        return state.tree.covered_by(record) is not None, _rooted(state, record)


def entered(
    state: StoreState,
    level: Level,
    record: BlockRecord,
    reservation: Reservation[BlockKey],
    stored_bytes: int,
    *,
    tail: bool,
    seconds: float,
) -> list[Doomed] | None:
    """Its file is named: it is in the books from now on; what it covers is to be unlinked.
    `seconds`: what naming took. None: the block before it went meanwhile.
    """
    with state.lock:
        if not _rooted(state, record):
            return None
        level.stats.write_seconds += seconds
        reservation.commit(record.key, stored_bytes)
        parent = record.parent
        note_turn(state, record)
        record = state.add_copy(record, level, stored_bytes)  # a survey may have been first
        _let_go(state, record.key, parent)
        state.early.pop(record.key, None)
        if record.parent in state.writing:
            state.early.setdefault(record.parent, []).append(record.key)
        doomed = take_covered(state, record, level.index)
        # A window moves on with its conversation: like a tail it is soon replaced by another.
        state.admission.committed(record, level, tail=tail or record.window)
        state.counters.put_blocks += 1
        state.counters.put_bytes += record.file_bytes
        level.wrote(record.namespace, stored_bytes)
        state.worked(level)
        state.count_overhead(level)
        return doomed


def used(state: StoreState, ends: Iterable[BlockKey]) -> None:
    """Marks the chains as used that end with these."""
    with state.lock:
        for key in ends:
            state.touch(state.tree.ancestors(key))


def _rooted(state: StoreState, record: BlockRecord) -> bool:
    parent = record.parent
    return parent == record.namespace or parent in state.tree or parent in state.writing


def _there(state: StoreState, record: BlockRecord) -> bool:
    """Leaves out what may be lost on a shared tier: nobody waits for its thread to look."""
    if record.key in state.suspects:
        return any(state.levels[index].shared is None for index in record.levels)
    return state.reachable(record) is not None


def _let_go(state: StoreState, key: BlockKey, parent: bytes) -> None:
    """What `begin` held."""
    state.writing.discard(key)
    state.let_go(key)
    state.let_go(BlockKey(parent))
