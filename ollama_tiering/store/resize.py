"""A budget that changes while the store runs: evicts down to a smaller one. Takes the lock."""

from __future__ import annotations

from ollama_tiering.store import room
from ollama_tiering.store.state import Level, StoreState
from ollama_tiering.store.tier import TierKind


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
    with state.lock:
        level.lru.budget_bytes = budget_bytes
    shrink(state, level)
    state.work.set()
    with state.lock:
        return level.lru.excess_bytes


def shrink(state: StoreState, level: Level) -> bool:
    """Evicts what is above the budget as far as it may go; whether anything went."""
    with state.lock:
        # What another thread evicts right now counts as gone, or both would evict for one excess.
        surplus = level.lru.excess_bytes - level.leaving_bytes
        if surplus <= 0:
            return False
        doomed = state.take_victims(level, surplus, partial=True)
    room.unlink(state, doomed)
    return bool(doomed) or room.purge_quarantine(state, level, keep_blocks=0)
