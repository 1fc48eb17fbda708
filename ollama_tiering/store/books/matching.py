"""What of a prompt is stored, and how soon it could be had: one piece of it in each call.

Every verb takes the lock, for a bounded number of blocks: serving/lookup.py asks for piece after
piece. Window blocks are named with the block they hang on.
"""

from __future__ import annotations

import heapq
from collections.abc import Iterable, Sequence
from operator import attrgetter
from typing import Final, NamedTuple

from ollama_tiering.store.block.key import TOKEN_BYTES, BlockKey, NamespaceId
from ollama_tiering.store.books.level import REFUSED
from ollama_tiering.store.books.report import AttachedBlock, MatchedBlock
from ollama_tiering.store.books.state import StoreState
from ollama_tiering.store.books.tree import BlockRecord

MAX_ATTACHED: Final = 4096  # window blocks of a piece, and of an answer: those of its last blocks
MOST_ON_ONE: Final = 64  # ... of one block: those used last
MAX_LOOKED_AT: Final = 8192  # window blocks in one hold of the lock, whatever hangs on the chain

Found = list[tuple[BlockRecord, int]]  # and how many of its rows match


class FoundPiece(NamedTuple):
    """What was found of a few of a prompt's blocks."""

    found: Found  # root to leaf, without what can be had from nowhere now
    blocks: list[MatchedBlock]  # the same, for the client
    last: bool  # the match ends here


def find_piece(
    state: StoreState,
    namespace: NamespaceId,
    parent: bytes,
    keys: Sequence[BlockKey],
    tokens: bytes,
    at: int,
    block_tokens: int,
    *,
    end: bool,
) -> FoundPiece:
    """The leading run of `keys`, which follow `parent`, and where it ends the best partly matching
    child. `tokens` are the whole prompt's, those of the first key begin at byte `at`. `end`: no key
    follows.
    """
    step = block_tokens * TOKEN_BYTES
    with state.lock:
        run = state.tree.run(namespace, parent, keys, tokens, at, step)
        piece: Found = [(record, block_tokens) for record in run]
        last = end or len(run) < len(keys)
        if last:
            at += len(run) * step
            piece += state.tree.best_child(run[-1].key if run else parent, tokens[at : at + step])
        found = describe(state, piece)
        return found._replace(last=last or found.last)


def describe(state: StoreState, piece: Found) -> FoundPiece:
    """What can be had of these blocks now; `last`: not all of them. The caller holds the lock."""
    reached = _reached(state, piece)
    return FoundPiece(reached, _described(state, reached), len(reached) < len(piece))


def touch(state: StoreState, leaf_to_root: Iterable[BlockRecord], *, hit: bool) -> None:
    """Marks as used, the leaf first: it is the first of them to be evicted."""
    with state.lock:
        state.touch(leaf_to_root, hit=hit)


def want(state: StoreState, leaf_to_root: Iterable[BlockRecord]) -> None:
    """Blocks that a prompt matched are worth the disk."""
    with state.lock:
        state.admission.used(leaf_to_root)


def count(state: StoreState, asked_tokens: int, found: Found) -> None:
    """A look-up is over."""
    with state.lock:
        counters = state.counters
        counters.has_calls += 1
        counters.asked_tokens += asked_tokens
        counters.matched_tokens += sum(rows for _, rows in found)
        if not found:
            counters.miss("unknown prefix")


def count_refused(state: StoreState, asked_tokens: int) -> None:
    """A rule keeps the model out: nothing is looked up."""
    with state.lock:
        state.counters.has_calls += 1
        state.counters.asked_tokens += asked_tokens
        state.counters.miss(REFUSED)


def _reached(state: StoreState, piece: Found) -> Found:
    """Cuts off what can be had from nowhere now, and what comes after it."""
    if resting := state.resting():
        reached = [not record.levels.issubset(resting) for record, _ in piece]
        if False in reached:
            state.counters.miss("out of reach")
            return piece[: reached.index(False)]
    return piece


def _described(state: StoreState, piece: Found) -> list[MatchedBlock]:
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
                record.fingerprint,
            )
        )
    return blocks


def _attached(
    state: StoreState,
    piece: Found,
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
