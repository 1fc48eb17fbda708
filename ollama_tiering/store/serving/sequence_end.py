"""Removing a sequence on purpose, from its end up to what another one needs."""

from __future__ import annotations

from collections.abc import Sequence

from ollama_tiering.store.block.key import BlockKey, NamespaceId
from ollama_tiering.store.books.state import Doomed, StoreState
from ollama_tiering.store.upkeep import room
from ollama_tiering.store.upkeep.graveyard import Block, Graveyard


def remove_end(
    state: StoreState, graveyard: Graveyard, namespace: NamespaceId, keys: Sequence[BlockKey]
) -> tuple[int, int, bool]:
    """Blocks and bytes removed, and whether a pinned block ended it."""
    doomed: list[Doomed] = []
    buried: dict[Block, float] = {}
    removed = 0
    pinned = False
    with state.lock:
        state.expire()
        for key in reversed(keys):
            record = state.tree.get(key)
            if record is None or record.namespace != namespace:
                continue
            kept = state.pins.keeps(key)  # a person's: not worth waiting for
            windows = state.tree.windows(key)
            pinned = not kept and any(state.pinned(one.key) for one in (record, *windows))
            if state.tree.child_count(key) or kept or pinned:
                break
            for one in (*windows, record):
                if graveyard.needed(one) and not graveyard.full(len(buried)):
                    buried[namespace, one.key] = one.created
                levels = [state.levels[index] for index in sorted(one.levels)]
                doomed += [d for level in levels if (d := state.drop_copy(level, one.key))]
                removed += 1
    graveyard.bury(buried)
    room.unlink(state, doomed)
    return removed, sum(one.claim.reserved_bytes for one in doomed), pinned
