"""Keeping one model's blocks within its budget: when there is no room left in it, the model's own
least recently used blocks make it.
"""

from __future__ import annotations

from typing import Final

from ollama_tiering.store.block.key import BlockKey, NamespaceId
from ollama_tiering.store.books import model_shares, reserving
from ollama_tiering.store.books.lru import Reservation
from ollama_tiering.store.books.state import Level, StoreState
from ollama_tiering.store.upkeep import making_room, unlinking

_ROUNDS: Final = 4


def reserve_room(
    state: StoreState, level: Level, namespace: NamespaceId, file_bytes: int
) -> Reservation[BlockKey] | None:
    """Reserves bytes of the model's budget and the tier's, evicting what must go. None: nothing
    more may go.
    """
    if not model_shares.limit_bytes(state, level, namespace):
        return making_room.reserve_room(state, level, file_bytes)
    with level.sharing:
        if not _make_room(state, level, namespace, file_bytes):
            return None
        reservation = making_room.reserve_room(state, level, file_bytes)
        if reservation is not None:
            reserving.count_for_model(state, level, namespace, reservation, file_bytes)
        return reservation


def shrink(state: StoreState, level: Level) -> bool:
    """Evicts what is above a budget that was set or lowered, as far as leases and pins allow."""
    evicted = False
    for namespace in state.terms.with_budget:
        limit = model_shares.limit_bytes(state, level, namespace)
        if not limit or not level.held_bytes.get(namespace):
            continue
        doomed = model_shares.excess_of(state, level, namespace)
        unlinking.unlink(state, doomed)
        evicted = evicted or bool(doomed)
    return evicted


def _make_room(state: StoreState, level: Level, namespace: NamespaceId, need_bytes: int) -> bool:
    if need_bytes > model_shares.limit_bytes(state, level, namespace):
        return False
    for _ in range(_ROUNDS):
        doomed = model_shares.victims_for(state, level, namespace, need_bytes)
        if doomed is None:
            return True
        if not doomed:
            return False
        unlinking.unlink(state, doomed)
    return False
