"""Copies of no use here: the damaged are put out of the way, the foreign stay where they are."""

from __future__ import annotations

import logging

from ollama_tiering.store.block.key import BlockKey, NamespaceId
from ollama_tiering.store.books import copies
from ollama_tiering.store.books.state import Level, StoreState
from ollama_tiering.store.errors import NotAuthentic, UnsupportedFormat

log = logging.getLogger(__name__)

_KEEP_BAD_BLOCKS = 16


def quarantine(state: StoreState, level: Level, namespace: NamespaceId, key: BlockKey) -> bool:
    """Renames a damaged copy out of the way and forgets it. False when it is not there."""
    try:
        level.tier.quarantine(namespace, key)
    except FileNotFoundError:
        copies.forget(state, level, key)
        return False
    except OSError as error:
        if level.shared is None:
            raise
        # Not to be trusted, though it cannot be put out of the way now: every copy is verified.
        log.warning("quarantine failed: key=%s error=%s", key.hex(), error)
        copies.forget(state, level, key)
        return False
    copies.quarantined(state, level, key)
    purge_quarantine(state, level, keep_blocks=_KEEP_BAD_BLOCKS)
    return True


def say_unusable(state: StoreState, level: Level, key: BlockKey, error: UnsupportedFormat) -> None:
    """Counted each time. What is not authentic may be a whole directory: said once, with the
    cure.
    """
    foreign = isinstance(error, NotAuthentic)
    said = copies.note_unusable(state, level, foreign=foreign)
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
    copies.recount(state, level)
    return level.tier.quarantined_bytes() < before
