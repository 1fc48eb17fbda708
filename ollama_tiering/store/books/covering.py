"""Tail blocks that a longer block makes needless: it holds all of their rows."""

from __future__ import annotations

from ollama_tiering.store.books.state import Doomed, StoreState
from ollama_tiering.store.books.tree import BlockRecord


def note_turn(state: StoreState, record: BlockRecord) -> None:
    """Call it before the block is entered: it may take the place of the end of an answer. A turn
    has gone on from there, and if no look-up told of it, it found all in memory. Lock held.
    """
    if any(not end.hits for end in state.tree.covers(record)):
        state.touch(state.tree.ancestors(record.parent), hit=True)


def take_covered(state: StoreState, record: BlockRecord, deepest: int) -> list[Doomed]:
    """Their copies, out of the books, in the tiers down to number `deepest`: where this block is
    durable. Further down they are all that a power cut leaves of these rows. Lock held.

    A leased one stays until it is evicted.
    """
    doomed = []
    for shorter in state.tree.covers(record):
        kept = any(state.held(one.key) for one in state.tree.windows(shorter.key))
        if not (kept or state.held(shorter.key) or state.pins.keeps(shorter.key)):
            # Another sidecar may have no other copy of it than the shared one.
            for one in (*state.tree.windows(shorter.key), shorter):
                levels = [
                    state.levels[index]
                    for index in sorted(one.levels)
                    if index <= deepest and state.levels[index].shared is None
                ]
                doomed += [d for level in levels if (d := state.drop_copy(level, one.key))]
    return doomed
