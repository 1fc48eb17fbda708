"""Removes files: of copies that the books have dropped, and of blocks that were not finished."""

from __future__ import annotations

import contextlib
import logging
import time
from collections.abc import Sequence
from typing import Final

from ollama_tiering.store.block.key import BlockKey
from ollama_tiering.store.books import copies, weather
from ollama_tiering.store.books.state import Doomed, Level, StoreState
from ollama_tiering.store.tiers.contract import TempBlock

log = logging.getLogger(__name__)

_WAIT_SECONDS: Final = 2.0
_ASK_AGAIN_SECONDS: Final = 0.005


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


def wait_for_name(state: StoreState, level: Level, key: BlockKey) -> bool:
    """Waits until no unlink is to come of a file that would have this name, for an unlink that was
    decided on before would take the new file. False: it takes too long. The caller holds the block,
    so that no further one is decided on.
    """
    deadline = time.monotonic() + _WAIT_SECONDS
    while copies.is_leaving(state, level, key):
        if time.monotonic() >= deadline:
            return False
        time.sleep(_ASK_AGAIN_SECONDS)
    return True


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
