"""What of a prompt is stored, and how soon it could be had.

In pieces: the lock is held for PIECE_BLOCKS blocks at a time, whatever the length of the prompt, so
others get their turn in between. What is evicted meanwhile makes the match end earlier.

Window blocks are named with the block they hang on, but a look-up is no use of them: which of them
a client takes only its fetch tells (leasing.py), and those it never takes are the first to go.
"""

from __future__ import annotations

import heapq
from collections.abc import Iterator, Sequence
from operator import attrgetter
from typing import Final

from ollama_tiering.store.block.key import TOKEN_BYTES, BlockKey, NamespaceId
from ollama_tiering.store.books.level import REFUSED
from ollama_tiering.store.books.report import AttachedBlock, MatchedBlock
from ollama_tiering.store.books.state import StoreState
from ollama_tiering.store.books.tree import BlockRecord

PIECE_BLOCKS: Final = 512  # a look-up of so many takes a fraction of a millisecond
MAX_ATTACHED: Final = 4096  # window blocks of a piece, and of an answer: those of its last blocks
MOST_ON_ONE: Final = 64  # ... of one block: those used last
MAX_LOOKED_AT: Final = 8192  # window blocks in one hold of the lock, whatever hangs on the chain

_Found = list[tuple[BlockRecord, int]]  # and how many of its rows match


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
    if state.terms.of(namespace).refusal:
        with state.lock:
            state.counters.has_calls += 1
            state.counters.asked_tokens += len(tokens) // TOKEN_BYTES
            state.counters.miss(REFUSED)
        return
    step = block_tokens * TOKEN_BYTES
    parent: bytes = namespace
    found: _Found = []
    for start in range(0, max(1, len(keys)), PIECE_BLOCKS):
        part = keys[start : start + PIECE_BLOCKS]
        with state.lock:
            run = state.tree.run(namespace, parent, part, tokens, start * step, step)
            piece: _Found = [(record, block_tokens) for record in run]
            parent = run[-1].key if run else parent
            over = len(run) < len(part) or start + PIECE_BLOCKS >= len(keys)
            if over:
                at = (start + len(run)) * step
                piece += state.tree.best_child(parent, tokens[at : at + step])
            reached = _reached(state, piece)
            blocks = _described(state, reached)
        found += reached
        yield blocks
        if over or len(reached) < len(piece):
            break
    yield from _use(state, found)
    with state.lock:
        counters = state.counters
        counters.has_calls += 1
        counters.asked_tokens += len(tokens) // TOKEN_BYTES
        counters.matched_tokens += sum(rows for _, rows in found)
        if not found:
            counters.miss("unknown prefix")


def _reached(state: StoreState, piece: _Found) -> _Found:
    """Without what can be had from nowhere now, and what comes after it."""
    if resting := state.resting():
        reached = [not record.levels.issubset(resting) for record, _ in piece]
        if False in reached:
            state.counters.miss("out of reach")
            return piece[: reached.index(False)]
    return piece


def _described(state: StoreState, piece: _Found) -> list[MatchedBlock]:
    speeds, resting = state.speeds(), state.resting()
    kinds = [level.tier.kind for level in state.levels]
    per_block, per_byte = speeds[0]
    attached = _attached(state, piece, speeds, resting)
    blocks = []
    for record, rows in piece:
        file_bytes = stored_bytes = record.file_bytes
        if 0 in record.levels and not record.encoded and not resting:  # by far the most
            nearest, seconds = 0, per_block + file_bytes * per_byte
        else:
            nearest, seconds = state.nearest(record, speeds, resting)
            stored_bytes = record.bytes_at(nearest)
        blocks.append(
            MatchedBlock(
                record.key,
                rows,
                record.rows,
                kinds[nearest],
                stored_bytes,
                file_bytes,
                seconds,
                attached.get(record.key, ()) if attached else (),
            )
        )
    return blocks


def _attached(
    state: StoreState,
    piece: _Found,
    speeds: Sequence[tuple[float, float]],
    resting: Sequence[int],
) -> dict[BlockKey, tuple[AttachedBlock, ...]]:
    """The window blocks that can be had now, by the block they hang on."""
    attached: dict[BlockKey, tuple[AttachedBlock, ...]] = {}
    if not piece or not state.tree.has_windows(piece[0][0].namespace):
        return attached
    left, looks = MAX_ATTACHED, MAX_LOOKED_AT
    for record, _ in reversed(piece):
        windows = state.tree.windows(record.key, looks)
        looks -= len(windows)
        if resting:
            windows = [one for one in windows if not one.levels.issubset(resting)]
        if len(windows) > MOST_ON_ONE:
            windows = heapq.nlargest(MOST_ON_ONE, windows, key=attrgetter("last_use"))
        if len(windows) > left:
            break
        if windows:
            left -= len(windows)
            attached[record.key] = tuple(_named(state, one, speeds, resting) for one in windows)
    return attached


def _named(
    state: StoreState,
    window: BlockRecord,
    speeds: Sequence[tuple[float, float]],
    resting: Sequence[int],
) -> AttachedBlock:
    if 0 in window.levels and not window.encoded and not resting:  # by far the most
        per_block, per_byte = speeds[0]
        seconds = per_block + window.file_bytes * per_byte
        return AttachedBlock(window.key, window.file_bytes, window.file_bytes, seconds)
    nearest, seconds = state.nearest(window, speeds, resting)
    return AttachedBlock(window.key, window.bytes_at(nearest), window.file_bytes, seconds)


def _use(state: StoreState, found: _Found) -> Iterator[list[MatchedBlock]]:
    """Marks as used, from the leaf to the root: the leaf is the first of them to be evicted."""
    root_to_leaf = [record for record, _ in found]
    if found and 2 * found[-1][1] < found[-1][0].rows:
        # A few rows in common, as under one chat template, do not make a block wanted.
        with state.lock:
            state.touch([root_to_leaf.pop()])
    starts = range(0, len(root_to_leaf), PIECE_BLOCKS)
    for start in reversed(starts):
        with state.lock:
            state.touch(reversed(root_to_leaf[start : start + PIECE_BLOCKS]), hit=True)
        yield []
    for start in starts:  # what comes before a block is queued already when its turn comes
        with state.lock:
            state.admission.used(reversed(root_to_leaf[start : start + PIECE_BLOCKS]))
        yield []
