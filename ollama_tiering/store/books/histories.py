"""Histories: where the tokens do not decide the bits of rows, one text may have been computed in
several ways, and each is a path of its own in the tree, from the root to its last block.

Every block says which rows it has (`fingerprint`, a part of its key), so no path mixes two
histories.
Every verb takes the lock, for a bounded number of blocks.
"""

from __future__ import annotations

import heapq
from collections.abc import Sequence
from operator import attrgetter
from typing import Final

from ollama_tiering.store.block.key import TOKEN_BYTES, BlockExtra, NamespaceId, extras_of
from ollama_tiering.store.books.matching import Found, FoundPiece, describe
from ollama_tiering.store.books.state import StoreState
from ollama_tiering.store.books.tree import BlockRecord

MOST_SIDE_BY_SIDE: Final = 8  # paths that a look-up follows: those used last
MOST_OF_A_TEXT: Final = 4  # blocks that follow one block with the same tokens and other rows
_MOST_ENDS: Final = 1024  # of one history that goes, at a time


class Walk:
    """Follows a prompt's tokens through the tree, along all histories at once. Extras count from
    the prompt's start. A path must begin with rows of `fingerprints`.
    """

    def __init__(
        self,
        namespace: NamespaceId,
        tokens: bytes,
        block_tokens: int,
        extras: Sequence[BlockExtra] = (),
        fingerprints: Sequence[bytes] = (),
    ) -> None:
        self._namespace = namespace
        self._tokens = tokens
        self._block_tokens = block_tokens
        self._extras = extras
        self._fingerprints = fingerprints
        self._depth = 0  # blocks that all of the ends have before and in them
        self._ends: list[BlockRecord] = []

    def on(self, state: StoreState, most_blocks: int) -> bool:
        """So many blocks further; whether there may be more."""
        step = self._block_tokens * TOKEN_BYTES
        with state.lock:
            for _ in range(most_blocks):
                tokens = self._tokens[self._depth * step : (self._depth + 1) * step]
                if len(tokens) < step:
                    return False
                parents = [end.key for end in self._ends] if self._depth else [self._namespace]
                inside = self._inside(self._depth)
                found = [
                    record
                    for parent in parents
                    for record in state.tree.same_tokens(parent, tokens, inside)
                    if record.namespace == self._namespace and self._is_on_path(record)
                ]
                if not found:
                    return False
                if len(found) > MOST_SIDE_BY_SIDE:
                    found = heapq.nlargest(MOST_SIDE_BY_SIDE, found, key=attrgetter("last_use"))
                self._ends = found
                self._depth += 1
        return True

    def path(self, state: StoreState) -> Found:
        """The longest, and of several the one used last; from the root to the leaf, which may match
        in part.
        """
        step = self._block_tokens * TOKEN_BYTES
        rest = self._tokens[self._depth * step : (self._depth + 1) * step]
        rest = rest[: self._rows_before_extras(self._depth) * TOKEN_BYTES]
        if self._depth < len(self._fingerprints):  # not all of what must come first is there
            rest = b""
        with state.lock:
            if not self._depth:
                return state.tree.best_child(self._namespace, rest)
            ends = [end for end in self._ends if end.key in state.tree]
            lasts = [state.tree.best_child(end.key, rest) for end in ends]
            order = [
                (last[0][1] if last else 0, end.last_use)
                for end, last in zip(ends, lasts, strict=True)
            ]
            if not order:
                return []
            best = order.index(max(order))
            records = list(state.tree.ancestors(ends[best].key))[::-1]
        if len(records) != self._depth:  # a part of it went meanwhile
            return []
        return [*((record, self._block_tokens) for record in records), *lasts[best]]

    def _is_on_path(self, record: BlockRecord) -> bool:
        return (
            self._depth >= len(self._fingerprints)
            or record.fingerprint == self._fingerprints[self._depth]
        )

    def _inside(self, index: int) -> list[BlockExtra]:
        return extras_of(self._extras, index * self._block_tokens, self._block_tokens)

    def _rows_before_extras(self, index: int) -> int:
        """What stands there besides a token is not compared where a block matches in part."""
        return min((extra.row for extra in self._inside(index)), default=self._block_tokens)


def describe_piece(state: StoreState, piece: Found) -> FoundPiece:
    """What is still there of a piece of a path, up to what can be had from nowhere now."""
    with state.lock:
        left = [state.tree.get(record.key) is record for record, _ in piece]
        there = piece[: left.index(False)] if False in left else piece
        found = describe(state, there)
    return FoundPiece(found.found, found.blocks, len(found.found) < len(piece))


def surplus_ends(state: StoreState, parent: bytes, tokens: bytes) -> list[BlockRecord]:
    """Finds, if more histories of one text go on from a block than are kept, the ends of the one
    that was used least recently.
    """
    with state.lock:
        same = state.tree.same_tokens(parent, tokens, ())
        if len(same) <= MOST_OF_A_TEXT:
            return []
        ends: list[BlockRecord] = []
        open_ends = [min(same, key=attrgetter("last_use"))]
        while open_ends and len(ends) < _MOST_ENDS:
            record = open_ends.pop()
            children = [one for one in state.tree.children(record.key) if not one.window]
            open_ends += children
            if not children:
                ends.append(record)
        return ends
