"""What of a prompt is stored, and how soon it could be had.

In pieces: the lock is held for PIECE_BLOCKS blocks at a time, whatever the length of the prompt, so
others get their turn in between. What is evicted meanwhile makes the match end earlier.

Window blocks are named with the block they hang on, but a look-up is no use of them: which of them
a client takes only its fetch tells (leasing.py), and those it never takes are the first to go.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Final

from ollama_tiering.store.block.key import TOKEN_BYTES, BlockExtra, BlockKey, NamespaceId
from ollama_tiering.store.books import histories, matching
from ollama_tiering.store.books.report import MatchedBlock
from ollama_tiering.store.books.state import StoreState

PIECE_BLOCKS: Final = 512  # looking them up takes a fraction of a millisecond


def match(
    state: StoreState,
    namespace: NamespaceId,
    keys: Sequence[BlockKey],
    tokens: bytes,
    block_tokens: int,
) -> list[MatchedBlock]:
    """Leading run of whole blocks, then the best partly matching child. Counts as use.

    The tier that is named for a block is the one that has it, decoded, in memory soonest.
    """
    pieces = match_in_pieces(state, namespace, keys, tokens, block_tokens)
    return [block for piece in pieces for block in piece]


def find_history(
    state: StoreState,
    namespace: NamespaceId,
    tokens: bytes,
    block_tokens: int,
    extras: Sequence[BlockExtra] = (),
    fingerprints: Sequence[bytes] = (),
    least_tokens: int = 0,
) -> tuple[list[MatchedBlock], Callable[[], None]]:
    """Works as `match`, where the tokens do not decide the bits of rows: the longest history that
    begins with the rows of `fingerprints`, whole blocks from the first on; if it has not
    `least_tokens`, the longest of all. Rows of `extras` count from the prompt's start. What was
    found counts as used, and as a look-up, when the second value is called: the caller may have to
    ask again before it answers its client.
    """
    found: matching.Found = []
    blocks: list[MatchedBlock] = []
    if not state.terms.of(namespace).refusal:
        for wanted in (fingerprints, ()) if fingerprints else ((),):
            walk = histories.Walk(namespace, tokens, block_tokens, extras, wanted)
            found, blocks = _walked(state, walk)
            if sum(block.rows for block in blocks) >= least_tokens:
                break

    def use() -> None:
        for _ in _count_use(state, namespace, tokens, found):
            pass

    return blocks, use


def _walked(state: StoreState, walk: histories.Walk) -> tuple[matching.Found, list[MatchedBlock]]:
    """The longest path, and what of it can be had."""
    while walk.on(state, PIECE_BLOCKS):
        pass
    found: matching.Found = []
    blocks: list[MatchedBlock] = []
    path = walk.path(state)
    for start in range(0, len(path), PIECE_BLOCKS):
        piece = histories.describe_piece(state, path[start : start + PIECE_BLOCKS])
        found += piece.found
        blocks += piece.blocks
        if piece.last:
            break
    return found, blocks


def match_in_pieces(
    state: StoreState,
    namespace: NamespaceId,
    keys: Sequence[BlockKey],
    tokens: bytes,
    block_tokens: int,
) -> Iterator[list[MatchedBlock]]:
    """The same for a caller that does something else in between. The last pieces, in which what
    was found is marked as used, are empty; one that stops before has not used it.
    """
    found: matching.Found = []
    yield from _find_in_pieces(state, namespace, keys, tokens, block_tokens, found)
    yield from _count_use(state, namespace, tokens, found)


def _find_in_pieces(
    state: StoreState,
    namespace: NamespaceId,
    keys: Sequence[BlockKey],
    tokens: bytes,
    block_tokens: int,
    found: matching.Found,
) -> Iterator[list[MatchedBlock]]:
    """Adds to `found` what it yields."""
    if state.terms.of(namespace).refusal:
        return
    step = block_tokens * TOKEN_BYTES
    parent: bytes = namespace
    for start in range(0, max(1, len(keys)), PIECE_BLOCKS):
        part = keys[start : start + PIECE_BLOCKS]
        end = start + PIECE_BLOCKS >= len(keys)
        piece = matching.find_piece(
            state, namespace, parent, part, tokens, start * step, block_tokens, end=end
        )
        found += piece.found
        yield piece.blocks
        if piece.last:
            break
        parent = part[-1]


def _count_use(
    state: StoreState, namespace: NamespaceId, tokens: bytes, found: matching.Found
) -> Iterator[list[MatchedBlock]]:
    """Marks what was found as used, and counts the look-up."""
    asked_tokens = len(tokens) // TOKEN_BYTES
    if not found and state.terms.of(namespace).refusal:
        matching.count_refused(state, asked_tokens)
        return
    yield from _use(state, found)
    matching.count(state, asked_tokens, found)
    state.watch.asked(namespace, tokens, found, state.wall_clock())


def _use(state: StoreState, found: matching.Found) -> Iterator[list[MatchedBlock]]:
    """Marks as used, from the leaf to the root: the leaf is the first of them to be evicted."""
    root_to_leaf = [record for record, _ in found]
    if found and 2 * found[-1][1] < found[-1][0].rows:
        # A few rows in common, as under one chat template, do not make a block wanted.
        matching.touch(state, [root_to_leaf.pop()], hit=False)
    starts = range(0, len(root_to_leaf), PIECE_BLOCKS)
    for start in reversed(starts):
        matching.touch(state, reversed(root_to_leaf[start : start + PIECE_BLOCKS]), hit=True)
        yield []
    for start in starts:  # what comes before a block is queued already when its turn comes
        matching.want(state, reversed(root_to_leaf[start : start + PIECE_BLOCKS]))
        yield []
