"""Room on a shared tier: what this sidecar claims of it, and what it drops to make some. Each verb
takes the lock. How claims keep the budget: shared_books.py.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from ollama_tiering.store.block.key import BlockKey
from ollama_tiering.store.books.shared_books import SharedBooks, fair_share
from ollama_tiering.store.books.state import Doomed, Level, StoreState
from ollama_tiering.store.tiers.contract import Neighbour


@dataclass(frozen=True, slots=True)
class ClaimPlan:
    """An allowance to announce; what is to be unlinked for it."""

    allowance_bytes: int
    raised: bool  # more than what holds now
    doomed: list[Doomed]


def down_to(state: StoreState, level: Level, high: float, low: float) -> list[Doomed]:
    """Above the high watermark: what was not used for longest, down to the low one."""
    budget_bytes = level.lru.budget_bytes
    with state.lock:
        counted_bytes = level.lru.counted_bytes
        if counted_bytes <= high * budget_bytes:
            return []
        surplus_bytes = counted_bytes - int(low * budget_bytes)
        return state.take_victims(level, surplus_bytes, partial=True) if surplus_bytes > 0 else []


def plan_claim(
    state: StoreState,
    level: Level,
    before: Sequence[Neighbour],
    neighbours: int,
    seen_bytes: int,
    *,
    unclear: bool,
    unseen_seconds: float,
) -> ClaimPlan:
    """`before`: the neighbours as they were before the scan that saw `seen_bytes` there. `unclear`:
    nothing may be claimed. `unseen_seconds` as for `announced_bytes`.
    """
    books = _books(level)
    with state.lock:
        books.neighbours = neighbours
        claims = sum(one.claim_bytes for one in before) + _unseen_bytes(
            state, books, unseen_seconds
        )
        # Not by the books: what left them may be there yet.
        free = level.lru.budget_bytes - seen_bytes - claims
        wanted = books.wanted_bytes
        allowance = 0 if unclear else fair_share(free, wanted, neighbours + 1)
        raised = allowance > books.allowance_bytes
        # Room that is only claimed comes back when its claimant looks again: nothing is dropped for
        # that.
        short = wanted - (free + claims) if wanted and not unclear else 0
        doomed = state.take_victims(level, short, partial=True) if short > 0 else []
        return ClaimPlan(allowance, raised, doomed)


def announced_bytes(
    state: StoreState, level: Level, allowance_bytes: int, unseen_seconds: float
) -> int:
    """The allowance, and what was written so lately (`unseen_seconds`; 0: all of it shows) that a
    listing, here or elsewhere, may not show it yet.
    """
    with state.lock:
        return allowance_bytes + _unseen_bytes(state, _books(level), unseen_seconds)


def grant(state: StoreState, level: Level, allowance_bytes: int) -> None:
    """It was announced, and holds."""
    with state.lock:
        _books(level).grant(allowance_bytes, state.clock(), state.wall_clock())


def touch_each(state: StoreState, level: Level, keys: Sequence[BlockKey]) -> None:
    """Touches them in the order of their uses by any sidecar."""
    with state.lock:
        for key in keys:
            level.lru.touch([key])


def _books(level: Level) -> SharedBooks:
    assert level.shared is not None
    return level.shared


def _unseen_bytes(state: StoreState, books: SharedBooks, unseen_seconds: float) -> int:
    now = state.clock()
    written_bytes = books.written_bytes(now, now - unseen_seconds)
    return written_bytes if unseen_seconds else 0
