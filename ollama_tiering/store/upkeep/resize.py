"""A budget that changes while the store runs: evicts down to a smaller one."""

from __future__ import annotations

from ollama_tiering.store.books import reserving
from ollama_tiering.store.books.state import StoreState
from ollama_tiering.store.tiers.contract import TierKind
from ollama_tiering.store.upkeep import making_room


def set_budget(state: StoreState, kind: TierKind, budget_bytes: int) -> int:
    """Bytes above the new budget that cannot go yet: leased, reserved, or not yet written down.

    ValueError when there is no such tier, or it would be none any more: tiers come and go with a
    restart.
    """
    level = next((level for level in state.levels if level.tier.kind is kind), None)
    if level is None:
        raise ValueError(f"there is no {kind.label} tier")
    if budget_bytes <= 0:
        raise ValueError(f"the {kind.label} tier cannot be removed while it is in use")
    reserving.set_budget(state, level, budget_bytes)
    making_room.shrink(state, level)
    state.work.set()
    return reserving.excess_bytes(state, level)
