"""Room in a tier: reserved before a file is written, given back if it is not. Each verb takes the
lock; who must evict for it is handed the victims, and asks again.
"""

from __future__ import annotations

from ollama_tiering.store.block.key import BlockKey
from ollama_tiering.store.books.eviction import blocking_leaf
from ollama_tiering.store.books.lru import Reservation
from ollama_tiering.store.books.state import Doomed, Level, StoreState


def reserve(state: StoreState, level: Level, need_bytes: int) -> Reservation[BlockKey] | None:
    """Reserves of what is free; nothing is evicted."""
    with state.lock:
        return level.lru.reserve(need_bytes)


def reserve_or_victims(
    state: StoreState, level: Level, need_bytes: int
) -> Reservation[BlockKey] | list[Doomed]:
    """The reservation, or what is to be unlinked before it is asked for again; empty: nothing may
    go.
    """
    with state.lock:
        if level.shared is not None:  # of the allowance: evicting gives nothing back at once
            now, wall_now = state.clock(), state.wall_clock()
            return level.shared.reserve(level.lru, need_bytes, now, wall_now) or []
        reservation = level.lru.reserve(need_bytes)
        if reservation is None:
            return state.take_victims(level, level.lru.shortfall_bytes(need_bytes))
        return reservation


def grown(
    state: StoreState, level: Level, reservation: Reservation[BlockKey], grown_bytes: int
) -> None:
    """A file was made: what directories grew by is counted with them, not in the reservation."""
    with state.lock:
        reservation.shrink(min(grown_bytes, level.tier.growth_bytes))
        state.count_overhead(level)


def release(
    state: StoreState, reservation: Reservation[BlockKey] | None, level: Level | None = None
) -> None:
    """`level`: files that are no blocks came or went there meanwhile."""
    with state.lock:
        if reservation is not None:
            reservation.release()
        if level is not None:
            state.count_overhead(level)


def victims(
    state: StoreState, level: Level, need_bytes: int, *, partial: bool = False
) -> list[Doomed]:
    """Out of the books; their files are to be unlinked. See StoreState.take_victims."""
    with state.lock:
        return state.take_victims(level, need_bytes, partial=partial)


def excess(state: StoreState, level: Level) -> tuple[list[Doomed], bool]:
    """What is to be unlinked so that the level is within its budget; whether that is not enough."""
    with state.lock:
        # What another thread evicts right now counts as gone, or both would evict for one excess.
        surplus = level.lru.excess_bytes - level.leaving_bytes
        doomed = state.take_victims(level, surplus, partial=True)
        if surplus > 0 and not doomed and (leaf := blocking_leaf(state, level)) is not None:
            doomed = [one for upper in state.levels for one in state.take(upper, [leaf])]
        freed_bytes = sum(one.reservation.reserved_bytes for one in doomed)
        return doomed, level.lru.excess_bytes > freed_bytes


def set_budget(state: StoreState, level: Level, budget_bytes: int) -> None:
    with state.lock:
        level.lru.budget_bytes = budget_bytes


def excess_bytes(state: StoreState, level: Level) -> int:
    with state.lock:
        return level.lru.excess_bytes
