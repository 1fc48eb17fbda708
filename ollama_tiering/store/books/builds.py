"""Two namespaces that differ in the engine's build alone: the rows that both have of the same
texts, compared by their fingerprints.

Where attention is exact, a text has one set of rows in a build, so another fingerprint of the same
tokens after the same rows is another build's arithmetic. Takes the lock, for a bounded number of
blocks.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable
from typing import Final, NamedTuple

from ollama_tiering.store.block.key import NamespaceId
from ollama_tiering.store.books.state import StoreState
from ollama_tiering.store.books.tree import BlockRecord

MOST_BLOCKS: Final = 4096  # compared at a time: some milliseconds
_PIECE_BLOCKS: Final = 256  # in one hold of the lock


class SameRows(NamedTuple):
    """`blocks`, with `tokens`, have the same tokens and the same rows in both; the last token of
    one of them is at `deepest_tokens`. `differ`: a block of the same tokens has other rows;
    counting ended there.
    """

    blocks: int
    tokens: int
    deepest_tokens: int
    differ: bool


def larger(
    state: StoreState, mine: NamespaceId, others: Iterable[NamespaceId]
) -> list[NamespaceId]:
    """Those that have more blocks than `mine`, the largest first."""
    with state.lock:
        counts = dict(state.tree.counts(len(state.tree)))
    own = counts.get(mine, 0)
    found = [name for name in others if counts.get(name, 0) > own]
    return sorted(found, key=lambda name: -counts[name])


def same_rows(state: StoreState, mine: NamespaceId, other: NamespaceId) -> SameRows:
    """Compares the texts that both have, from their start, as far as both have them, MOST_BLOCKS at
    most. What an image or anything else but tokens stands in is left out, with all that follows.
    """
    blocks = tokens = deepest = 0
    pairs: list[tuple[bytes, bytes, int]] = [
        (mine, other, 0)
    ]  # the keys that blocks follow, and the tokens before these
    while pairs and blocks < MOST_BLOCKS:
        parent, their_parent, before = pairs.pop()
        for start in itertools.count(0, _PIECE_BLOCKS):
            with state.lock:
                piece = state.tree.children(parent)[start : start + _PIECE_BLOCKS]
                both = [
                    (record, theirs)
                    for record in piece
                    if (theirs := _comparable(state, record, mine, their_parent, other))
                ]
            for record, theirs in both:
                if any(one.fingerprint != record.fingerprint for one in theirs):
                    return SameRows(blocks, tokens, deepest, differ=True)
                end = before + record.rows
                blocks, tokens, deepest = blocks + 1, tokens + record.rows, max(deepest, end)
                pairs.append((record.key, theirs[0].key, end))
            if len(piece) < _PIECE_BLOCKS or blocks >= MOST_BLOCKS:
                break
    return SameRows(blocks, tokens, deepest, differ=False)


def _comparable(
    state: StoreState, record: BlockRecord, mine: NamespaceId, parent: bytes, other: NamespaceId
) -> list[BlockRecord]:
    """The other build's blocks of the same tokens."""
    if record.plain_rows != record.rows or not record.fingerprint or record.namespace != mine:
        return []
    same = state.tree.same_tokens(parent, record.tokens, ())
    return [one for one in same if one.namespace == other]
