"""Removing a sequence on purpose, from its end up to what another one needs."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Final

from ollama_tiering.store.block.key import BlockKey, NamespaceId
from ollama_tiering.store.books.chain_walk import take_end
from ollama_tiering.store.books.state import StoreState
from ollama_tiering.store.upkeep import unlinking
from ollama_tiering.store.upkeep.graveyard import Graveyard

REMOVE_WAIT_SECONDS: Final = 1.0  # for blocks at the end that are being written down


def remove_end(
    state: StoreState, graveyard: Graveyard, namespace: NamespaceId, keys: Sequence[BlockKey]
) -> tuple[int, int]:
    """Blocks and bytes removed. Waits for a block that is in use, which ends it at last."""
    removed = freed_bytes = 0
    deadline = time.monotonic() + REMOVE_WAIT_SECONDS
    while True:
        end = take_end(state, graveyard.graves, namespace, keys)
        graveyard.bury(end.to_bury)
        unlinking.unlink(state, end.doomed)
        removed += end.blocks
        freed_bytes += sum(one.reservation.reserved_bytes for one in end.doomed)
        if not end.in_use or time.monotonic() >= deadline:
            return removed, freed_bytes
        time.sleep(0.01)
