"""What one model's blocks take of a tier on a disk, and keeping that within the model's budget.

Counted are the physical bytes of its blocks, unfinished ones with what is reserved for them. When
there is no room left in the budget, the model's own least recently used blocks make it. RAM has no
such bound.
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
from ollama_tiering.store.tiers.contract import TierKind
from ollama_tiering.store.upkeep import room

MAX_MODELS_SHOWN: Final = 256  # in one answer to whoever asks

_ROUNDS: Final = 4
_AT_ONCE: Final = 16  # a sixteenth of the budget is freed: finding the oldest looks at all blocks


def used_bytes(state: StoreState, level: Level, namespace: NamespaceId) -> int:
    """Of all namespaces of its model. Lock held."""
    return sum(level.held_bytes.get(name, 0) for name in state.terms.together(namespace))


def models(state: StoreState) -> list[ModelReport]:
    """Models with terms of their own, and what they take. Lock held."""
    found = []
    plain = replace(state.terms.unknown, name="", refusal="")
    for model, namespaces in state.terms.by_model().items():
        terms = state.terms.of(namespaces[0])
        if replace(terms, name="") == plain:
            continue
        held = {TierKind.RAM: 0, TierKind.LOCAL: 0, TierKind.REMOTE: 0}
        for level in state.levels:
            held[level.tier.kind] += used_bytes(state, level, namespaces[0])
        found.append(
            ModelReport(model, namespaces, terms, held[TierKind.LOCAL], held[TierKind.REMOTE])
        )
    return found[:MAX_MODELS_SHOWN]


def reserve_room(
    state: StoreState, level: Level, namespace: NamespaceId, file_bytes: int
) -> Reservation[BlockKey] | None:
    """A claim on the model's budget and the tier's, evicting what must go. None: nothing more may
    be evicted.
    """
    if not _limit_bytes(state, level, namespace):
        return room.reserve_room(state, level, file_bytes)
    with level.sharing:
        if not _make_room(state, level, namespace, file_bytes):
            return None
        claim = room.reserve_room(state, level, file_bytes)
        if claim is not None:
            with state.lock:
                level.count(namespace, file_bytes)
                claim.ended = functools.partial(level.count, namespace, -file_bytes)
        return claim


def shrink(state: StoreState, level: Level) -> bool:
    """Evicts what is above a budget that was set or lowered, as far as leases and pins allow."""
    evicted = False
    for namespace in state.terms.with_budget:
        limit = _limit_bytes(state, level, namespace)
        if not limit or not level.held_bytes.get(namespace):
            continue
        with state.lock:
            over_bytes = used_bytes(state, level, namespace) - limit
            doomed = _take(state, level, namespace, over_bytes)
            if over_bytes > 0 and not doomed:
                doomed = state.take(level, _oldest(state, level, namespace, over_bytes, True))
            if over_bytes > 0 and not doomed:
                leaf = blocking_leaf(state, level, state.terms.together(namespace))
                doomed = [d for v in state.levels if leaf for d in state.take(v, [leaf])]
        room.unlink(state, doomed)
        evicted = evicted or bool(doomed)
    return evicted


def _limit_bytes(state: StoreState, level: Level, namespace: NamespaceId) -> int:
    """0: none of its own."""
    return 0 if level.tier.kind is TierKind.RAM else state.terms.of(namespace).budget_bytes


def _make_room(state: StoreState, level: Level, namespace: NamespaceId, need_bytes: int) -> bool:
    limit = _limit_bytes(state, level, namespace)
    if need_bytes > limit:
        return False
    for _ in range(_ROUNDS):
        with state.lock:
            over_bytes = used_bytes(state, level, namespace) + need_bytes - limit
            if over_bytes <= 0:
                return True
            doomed = _take(state, level, namespace, over_bytes)
        if not doomed:
            return False
        room.unlink(state, doomed)
    return False


def _take(state: StoreState, level: Level, namespace: NamespaceId, need_bytes: int) -> list[Doomed]:
    """So much of the model's blocks, and some to spare if that can be; else none. Lock held."""
    if need_bytes <= 0:
        return []
    state.expire()
    spare = max(need_bytes, _limit_bytes(state, level, namespace) // _AT_ONCE)
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
