"""What is stored behind the place where a prompt parts from it. Every verb takes the lock, for a
bounded number of blocks.
"""

from __future__ import annotations

import heapq
from collections.abc import Iterator
from operator import attrgetter
from typing import Final

from ollama_tiering.store.block.key import DEFAULT_BLOCK_TOKENS, TOKEN_BYTES, BlockKey, NamespaceId
from ollama_tiering.store.books.histories import Walk
from ollama_tiering.store.books.state import StoreState
from ollama_tiering.store.books.tree import BlockRecord, common_rows
from ollama_tiering.store.books.watch import ShortLookUp

MOST_PATHS: Final = 8  # that part from a prompt at the same token: those used last
_MOST_SIBLINGS: Final = 512  # among which these are looked for
_PIECE_BLOCKS: Final = 64  # in one hold of the lock
_MOST_NAMESPACES: Final = 16  # of one model
_STEP: Final = DEFAULT_BLOCK_TOKENS * TOKEN_BYTES


def continuations(state: StoreState, asked: ShortLookUp, most_tokens: int) -> list[bytes]:
    """What each stored path has behind the last token that the prompt shares with it, the path that
    was used last first. Nothing, if what is stored only ends there.
    """
    place = _place(asked)
    if place is None:
        return []
    parent, prefix, ahead = place
    rows = len(prefix) // TOKEN_BYTES
    with state.lock:
        found = state.tree.sharing(parent, prefix, _MOST_SIBLINGS)
        if asked.last_rows == rows and asked.last and not any(r is asked.last for r in found):
            found.append(asked.last)  # it went meanwhile
        other = [  # the prompt itself may have been stored meanwhile
            one
            for one in found
            if one.rows > rows and common_rows(one.tokens[rows * TOKEN_BYTES :], ahead) == 0
        ]
    starts = heapq.nlargest(MOST_PATHS, other, key=attrgetter("last_use"))
    return [_path(state, start, rows, most_tokens) for start in starts]


def evicted(state: StoreState, asked: ShortLookUp) -> tuple[int, float]:
    """How many tokens of the prompt lay in blocks that were evicted, right behind those that are
    there still; and when the first of them was.
    """
    whole = asked.matched_tokens // DEFAULT_BLOCK_TOKENS
    parent: bytes = asked.namespace
    if asked.last is not None:
        full = asked.last_rows == DEFAULT_BLOCK_TOKENS
        parent = asked.last.key if full else asked.last.parent
    since = 0.0
    blocks = 0
    for at in range(whole * _STEP, len(asked.tokens) - _STEP + 1, _STEP):
        gone = state.watch.gone(parent, asked.tokens[at : at + _STEP])
        if gone is None:
            break
        since = since or gone.unix_seconds
        blocks += 1
        parent = gone.key
    lost = (whole + blocks) * DEFAULT_BLOCK_TOKENS - asked.matched_tokens
    return (lost, since) if blocks and lost > 0 else (0, 0.0)


def elsewhere(state: StoreState, asked: ShortLookUp) -> tuple[int, NamespaceId | None]:
    """How many of the prompt's first tokens are stored under other settings of its model, or for
    another build of the engine; and where.
    """
    best: tuple[int, NamespaceId | None] = 0, None
    others = sorted(state.terms.together(asked.namespace) - {asked.namespace})
    for other in others[:_MOST_NAMESPACES]:
        if state.terms.of(other).refusal:
            continue
        walk = Walk(other, asked.tokens, DEFAULT_BLOCK_TOKENS)
        while walk.on(state, _PIECE_BLOCKS):
            pass
        rows = sum(rows for _, rows in walk.path(state))
        best = max(best, (rows, other), key=lambda one: one[0])
    return best


def _place(asked: ShortLookUp) -> tuple[bytes, bytes, bytes] | None:
    """The parent of the blocks in which paths part, what they share with the prompt, and what
    the prompt goes on with.
    """
    if asked.last is None:
        return None
    ahead = asked.tokens[asked.matched_tokens * TOKEN_BYTES :][:_STEP]
    if asked.last_rows < asked.last.rows:
        return asked.last.parent, asked.last.tokens[: asked.last_rows * TOKEN_BYTES], ahead
    return asked.last.key, b"", ahead


def _path(state: StoreState, start: BlockRecord, rows: int, most_tokens: int) -> bytes:
    parts = [start.tokens[rows * TOKEN_BYTES :]]
    left = most_tokens - len(parts[0]) // TOKEN_BYTES
    for record in _on(state, start.key):
        if left <= 0:
            break
        parts.append(record.tokens)
        left -= record.rows
    return b"".join(parts)[: most_tokens * TOKEN_BYTES]


def _on(state: StoreState, key: BlockKey) -> Iterator[BlockRecord]:
    """The blocks that follow, where there are several the one that was used last."""
    piece = [key]
    while piece:
        records: list[BlockRecord] = []
        with state.lock:
            at = piece[-1]
            for _ in range(_PIECE_BLOCKS):
                children = [one for one in state.tree.children(at) if not one.window]
                if not children:
                    break
                records.append(max(children, key=attrgetter("last_use")))
                at = records[-1].key
        yield from records
        piece = [record.key for record in records]
