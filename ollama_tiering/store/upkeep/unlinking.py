"""Removes files: of copies that the books have dropped, and of blocks that were not finished."""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Sequence

from ollama_tiering.store.books import copies, weather
from ollama_tiering.store.books.state import Doomed, Level, StoreState
from ollama_tiering.store.tiers.contract import TempBlock

log = logging.getLogger(__name__)


def unlink(state: StoreState, doomed: Sequence[Doomed]) -> list[Doomed]:
    """Returns those whose files are still there."""
    failed = []
    for one in doomed:
        if copies.left_to_its_thread(state, one):
            continue
        unlinked = True
        try:
            one.level.tier.remove(one.namespace, one.key)
        except OSError as error:
            unlinked = False
            failed.append(one)
            log.warning("unlink failed: key=%s error=%s", one.key.hex(), error)
        copies.gone(state, one, unlinked=unlinked)
    return failed


def sync_removals(state: StoreState) -> None:
    """What a person removed does not come back after a power cut. OSError is weather."""
    for level in state.levels:
        try:
            level.tier.sync_removals()
        except OSError as error:
            weather.failed(state, level, error, "sync")


def discard(level: Level, temp: TempBlock) -> None:
    with contextlib.suppress(OSError):
        level.tier.discard(temp)
