"""What one model's blocks take of a tier on a disk, and which of them go to keep its budget.

Counted are the physical bytes of its blocks, unfinished ones with what is reserved for them. A
volatile tier has no such bound. `victims_for`, `count` and `excess_of` take the lock; the rest
expects it to be held.
"""

from __future__ import annotations

import functools
from dataclasses import replace
from typing import Final

from ollama_tiering.store.block.key import BlockKey, NamespaceId
from ollama_tiering.store.books.eviction import Rules, blocking_leaf
from ollama_tiering.store.books.lru import Reservation
from ollama_tiering.store.books.report import ModelReport
from ollama_tiering.store.books.state import Doomed, Level, StoreState

MAX_MODELS_SHOWN: Final = 256  # in one answer to whoever asks

_AT_ONCE: Final = 16  # a sixteenth of the budget is freed: finding the oldest looks at all blocks


def limit_bytes(state: StoreState, level: Level, namespace: NamespaceId) -> int:
    """0: none of its own. Needs no lock."""
    return 0 if level.tier.is_volatile else state.terms.of(namespace).budget_bytes


def used_bytes(state: StoreState, level: Level, namespace: NamespaceId) -> int:
    """Sums all namespaces of its model. Lock held."""
    return sum(level.held_bytes.get(name, 0) for name in state.terms.together(namespace))


def models(state: StoreState) -> list[ModelReport]:
    """Models with terms of their own, and what they take. Lock held."""
    found = []
    plain = replace(state.terms.unknown, name="", refusal="")
    for model, namespaces in state.terms.by_model().items():
        terms = state.terms.of(namespaces[0])
        if replace(terms, name="") == plain:
            continue
        own_bytes = shared_bytes = 0
        for level in state.levels:
            if level.tier.is_shared:
                shared_bytes += used_bytes(state, level, namespaces[0])
            elif not level.tier.is_volatile:
                own_bytes += used_bytes(state, level, namespaces[0])
        found.append(ModelReport(model, namespaces, terms, own_bytes, shared_bytes))
    return found[:MAX_MODELS_SHOWN]


def victims_for(
    state: StoreState, level: Level, namespace: NamespaceId | None, need_bytes: int
) -> list[Doomed] | None:
    """What is to be unlinked so that the model has room for that much; empty: nothing may go, None:
    it has room, or no budget of its own (any more).
    """
    if namespace is None or not limit_bytes(state, level, namespace):
        return None
    with state.lock:
        limit = limit_bytes(state, level, namespace)  # once: terms change without the lock
        over_bytes = used_bytes(state, level, namespace) + need_bytes - limit
        if not limit or over_bytes <= 0:
            return None
        if need_bytes > limit:  # nothing would do: no need to look at all blocks
            return []
        return _take(state, level, namespace, over_bytes, limit)


def count(
    state: StoreState,
    level: Level,
    namespace: NamespaceId | None,
    reservation: Reservation[BlockKey],
    file_bytes: int,
) -> None:
    """Bytes of the model, too, until the reservation ends."""
    if namespace is None or not limit_bytes(state, level, namespace):
        return
    with state.lock:
        level.count(namespace, file_bytes)
        reservation.ended = functools.partial(level.count, namespace, -file_bytes)


def excess_of(state: StoreState, level: Level, namespace: NamespaceId) -> list[Doomed]:
    """What is above a budget that was set or lowered, as far as leases and pins allow. Nothing
    where there is none.
    """
    with state.lock:
        limit = limit_bytes(state, level, namespace)  # once: terms change without the lock
        over_bytes = used_bytes(state, level, namespace) - limit
        if not limit or over_bytes <= 0:
            return []
        doomed = _take(state, level, namespace, over_bytes, limit)
        if not doomed:
            doomed = state.take(level, _oldest(state, level, namespace, over_bytes, True))
        if not doomed:
            leaf = blocking_leaf(state, level, state.terms.together(namespace))
            doomed = [d for v in state.levels if leaf for d in state.take(v, [leaf])]
        return doomed


def _take(
    state: StoreState, level: Level, namespace: NamespaceId, need_bytes: int, limit: int
) -> list[Doomed]:
    """So much of the model's blocks, and some to spare if that can be; else none."""
    state.expire()
    spare = max(need_bytes, limit // _AT_ONCE)
    chosen = _oldest(state, level, namespace, spare, False)
    if not chosen and spare > need_bytes:
        chosen = _oldest(state, level, namespace, need_bytes, False)
    return state.take(level, chosen)


def _oldest(
    state: StoreState, level: Level, namespace: NamespaceId, need_bytes: int, partial: bool
) -> list[BlockKey]:
    mine = state.terms.together(namespace)
    rules = Rules(state, level, partial=False)

    def may_evict(key: BlockKey) -> bool:
        record = state.tree.get(key)
        return record is not None and record.namespace in mine and rules.may_evict(key)

    return level.lru.victims(need_bytes, may_evict, rules.unblocks, partial=partial)
