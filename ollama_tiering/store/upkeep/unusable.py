"""Copies of no use here: the damaged are put out of the way, the foreign stay where they are.

Takes the lock.
"""

from __future__ import annotations

import logging

from ollama_tiering.store.block.key import BlockKey, NamespaceId
from ollama_tiering.store.books.state import Level, StoreState
from ollama_tiering.store.errors import NotAuthentic, UnsupportedFormat

log = logging.getLogger(__name__)

_KEEP_BAD_BLOCKS = 16


def quarantine(state: StoreState, level: Level, namespace: NamespaceId, key: BlockKey) -> bool:
    """Renames a damaged copy out of the way and forgets it. False when it is not there."""
    try:
        level.tier.quarantine(namespace, key)
    except FileNotFoundError:
        with state.lock:
            state.forget_copy(level, key)
        return False
    except OSError as error:
        if level.shared is None:
            raise
        # Not to be trusted, though it cannot be put out of the way now: every copy is verified.
        log.warning("quarantine failed: key=%s error=%s", key.hex(), error)
        with state.lock:
            state.forget_copy(level, key)
        return False
    with state.lock:
        level.stats.quarantined_blocks += 1
        state.counters.miss("corrupt")
        state.forget_copy(level, key)
        state.count_overhead(level)
    purge_quarantine(state, level, keep_blocks=_KEEP_BAD_BLOCKS)
    return True


def set_aside(state: StoreState, level: Level, key: BlockKey, error: UnsupportedFormat) -> None:
    """Forgets a copy that cannot be used here; its file stays and its bytes count."""
    say_unusable(state, level, key, error)
    with state.lock:
        if level.shared is not None:
            level.shared.passed_over[key] = None
        doomed = state.drop_copy(level, key)
        if doomed:
            state.gone(doomed, unlinked=False)


def say_unusable(state: StoreState, level: Level, key: BlockKey, error: UnsupportedFormat) -> None:
    """Counted each time. What is not authentic may be a whole directory: said once, with the
    cure.
    """
    foreign = isinstance(error, NotAuthentic)
    with state.lock:
        state.counters.miss("not authentic" if foreign else "unknown format")
        said, level.said_not_authentic = level.said_not_authentic, foreign
        level.said_not_authentic |= said
    if not foreign:
        log.warning("block not readable here, kept: key=%s reason=%s", key.hex(), error)
    elif not said:
        log.warning(
            "not authentic, neither used nor removed: tier=%s key=%s reason=%s; %s "
            "(more are counted: `tiering status`, misses)",
            level.tier.kind.label,
            key.hex(),
            error,
            error.hint,
        )


def purge_quarantine(state: StoreState, level: Level, *, keep_blocks: int) -> bool:
    """Keeps only the newest damaged blocks; their bytes count against the budget."""
    before = level.tier.quarantined_bytes()
    try:
        level.tier.purge_quarantine(keep_blocks)
    except OSError as error:
        log.warning("purge failed: tier=%s error=%s", level.tier.kind.label, error)
    with state.lock:
        state.count_overhead(level)
    return level.tier.quarantined_bytes() < before
