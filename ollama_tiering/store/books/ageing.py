"""What is past its time to live, children before their parents. Each verb takes the lock."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Final

from ollama_tiering.store.block.key import BlockKey
from ollama_tiering.store.books.eviction import Rules
from ollama_tiering.store.books.state import Doomed, Level, StoreState
from ollama_tiering.store.books.tree import BlockRecord

_YOUNG_BLOCKS: Final = 64  # in a row; what follows is younger still, but for small disorder


def segments(state: StoreState, level: Level) -> list[list[BlockKey]]:
    """The level's blocks as its LRU has them, those used longest ago first in each."""
    with state.lock:
        return [list(segment) for segment in level.lru.segments()]


def take_too_old(
    state: StoreState, level: Level, keys: Sequence[BlockKey], now: float, shortest: float
) -> tuple[list[Doomed], bool]:
    """Takes of these what is too old; says whether all that follows is young. `now`: Unix seconds;
    `shortest`: the shortest time to live, in seconds.
    """
    with state.lock:
        state.expire()
        chosen, young = _choose(state, level, keys, now, shortest)
        doomed = state.take(level, chosen)
        level.stats.expired_blocks += len(doomed)
        return doomed, young


def _choose(
    state: StoreState, level: Level, keys: Sequence[BlockKey], now: float, shortest: float
) -> tuple[list[BlockKey], bool]:
    """What is too old of these; whether all that follows is young."""
    rules = Rules(state, level, partial=False)
    chosen: dict[BlockKey, None] = {}
    young = 0
    for key in keys:
        record = state.tree.get(key)
        young = young + 1 if record and record.last_use >= now - shortest else 0
        if young >= _YOUNG_BLOCKS:
            return list(chosen), True
        for one in _chain(state, level, record, now, rules, chosen):
            chosen[one.key] = None
            rules.unblocks(one.key)
    return list(chosen), False


def _chain(
    state: StoreState,
    level: Level,
    record: BlockRecord | None,
    now: float,
    rules: Rules,
    chosen: dict[BlockKey, None],
) -> Iterator[BlockRecord]:
    """The block and, one by one, the parents that may go with it."""
    while record is not None and record.key in level.lru:
        ttl_seconds = state.terms.of(record.namespace).ttl_seconds
        if (
            not ttl_seconds
            or record.last_use >= now - ttl_seconds
            or record.key in chosen
            or level.lru.held(record.key)
            or not rules.may_evict(record.key)
        ):
            return
        yield record
        record = state.tree.get(BlockKey(record.parent))
