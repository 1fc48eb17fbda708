"""What the thread of a shared level is to do, and what came of it. Each verb takes the lock."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass

from ollama_tiering.store.block.key import BlockKey, NamespaceId
from ollama_tiering.store.books.shared_books import Fields, SharedBooks
from ollama_tiering.store.books.state import Level, StoreState
from ollama_tiering.store.books.tree import BlockRecord
from ollama_tiering.store.tiers.authenticity import MAX_AUTHENTIC_BYTES


@dataclass(frozen=True, slots=True)
class Errand:
    """What somebody asked for: a namespace to be described, a block to be removed; with a time, a
    person asked then.
    """

    described: tuple[NamespaceId, Fields] | None
    doomed: tuple[tuple[NamespaceId, BlockKey], float | None] | None


def next_errand(state: StoreState, level: Level) -> Errand:
    books = _books(level)
    with state.lock:
        described = next(iter(books.to_describe.items()), None)
        doomed = next(iter(books.doomed.items()), None)
        return Errand(described, doomed)


def to_describe(
    state: StoreState, level: Level, namespace: NamespaceId, fields: Sequence[tuple[str, str]]
) -> None:
    """Asks the thread for it: nobody else waits for the tier."""
    with state.lock:
        _books(level).describe(namespace, fields)


def described(state: StoreState, level: Level, namespace: NamespaceId) -> None:
    with state.lock:
        _books(level).to_describe.pop(namespace, None)


def oldest(state: StoreState, level: Level, nth: int) -> BlockRecord | None:
    """The block that the level would evict after `nth` others; it goes round where there are
    fewer.
    """
    with state.lock:
        some = list(itertools.islice(level.lru, nth + 1))
        key = some[nth % len(some)] if some else None
        return state.tree.get(key) if key is not None else None


def next_demotion(
    state: StoreState, level: Level, source: Level, high: float, low: float, *, demoting: bool
) -> tuple[BlockRecord | None, bool]:
    """A block to be copied down to the level: unsaved ones of a volatile source, else the
    oldest of one between the watermarks; held until `copies.let_go`. And whether the source is on
    its way down.
    """
    with state.lock:
        if source.tier.is_volatile:
            record = _unsaved(state, level, source)
        else:
            budget = source.lru.budget_bytes
            if source.lru.counted_bytes > high * budget:
                demoting = True
            elif source.lru.counted_bytes <= int(low * budget):
                demoting = False
            record = _oldest_wanted(state, level, source) if demoting else None
        if record is None or state.suspended(source):
            return None, demoting
        state.hold(record.key)
        _books(level).doomed.pop((record.namespace, record.key), None)
        return record, demoting


def demoted(state: StoreState, record: BlockRecord, *, done: bool) -> None:
    """It may be evicted above now; or it is tried again later."""
    with state.lock:
        if done:
            state.unsaved.discard(record.key)
            state.work.set()
        elif record.key in state.unsaved:
            state.unsaved.defer(record.key)


def _books(level: Level) -> SharedBooks:
    assert level.shared is not None
    return level.shared


def _unsaved(state: StoreState, level: Level, source: Level) -> BlockRecord | None:
    while ready := state.unsaved.ready(state.clock(), 1):
        (key,) = ready
        record = state.tree.get(key)
        if record is not None and _wanted(state, level, record, source):
            return record
        state.unsaved.discard(key)
    return None


def _oldest_wanted(state: StoreState, level: Level, source: Level) -> BlockRecord | None:
    for key in source.lru:
        record = state.tree.get(key)
        if (
            record is not None
            and not source.lru.held(key)
            and _wanted(state, level, record, source)
        ):
            return record
    return None


def _wanted(state: StoreState, level: Level, record: BlockRecord, source: Level) -> bool:
    """Whether a copy below is missing, and possible."""
    return (
        source.index in record.levels
        and level.index not in record.levels
        and not state.terms.of(record.namespace).refusal
        and record.file_bytes <= min(level.lru.budget_bytes, MAX_AUTHENTIC_BYTES)
    )
