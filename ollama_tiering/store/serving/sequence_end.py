"""Removing a sequence on purpose, from its end up to what another one needs."""

from __future__ import annotations

from collections.abc import Sequence

from ollama_tiering.store.block.key import BlockKey, NamespaceId
from ollama_tiering.store.books.chain_walk import take_end
from ollama_tiering.store.books.state import StoreState
from ollama_tiering.store.upkeep import unlinking
from ollama_tiering.store.upkeep.graveyard import Graveyard


def remove_end(
    state: StoreState, graveyard: Graveyard, namespace: NamespaceId, keys: Sequence[BlockKey]
) -> tuple[int, int, bool]:
    """Blocks and bytes removed, and whether a block that is in use ended it."""
    end = take_end(state, graveyard.graves, namespace, keys)
    graveyard.bury(end.to_bury)
    unlinking.unlink(state, end.doomed)
    return end.blocks, sum(one.reservation.reserved_bytes for one in end.doomed), end.in_use
