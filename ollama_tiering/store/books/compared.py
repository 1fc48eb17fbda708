"""Rows that an engine has computed, compared with those that are stored of the same text."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from ollama_tiering.store.block.key import TOKEN_BYTES, BlockKey, NamespaceId
from ollama_tiering.store.books.state import StoreState

_PIECE_BLOCKS = 256  # in one hold of the lock


class OtherRows(NamedTuple):
    """A stored block of the same text with other rows."""

    key: BlockKey
    first_token: int


class Compared(NamedTuple):
    alike: list[BlockKey]
    other: list[OtherRows]


def compare(
    state: StoreState,
    namespace: NamespaceId,
    tokens: bytes,
    block_tokens: int,
    fingerprints: Sequence[bytes],
) -> Compared:
    """Whole blocks from the first on, as long as there is one with these rows."""
    step = block_tokens * TOKEN_BYTES
    count = min(len(tokens) // step, len(fingerprints))
    found = Compared([], [])
    parent: bytes = namespace
    for start in range(0, count, _PIECE_BLOCKS):
        with state.lock:
            for index in range(start, min(start + _PIECE_BLOCKS, count)):
                same = state.tree.same_tokens(parent, tokens[index * step : (index + 1) * step], ())
                same = [one for one in same if one.namespace == namespace]
                mine = [one for one in same if one.fingerprint == fingerprints[index]]
                found.other.extend(
                    OtherRows(one.key, index * block_tokens) for one in same if one not in mine
                )
                if not mine:
                    return found
                parent = mine[0].key
                found.alike.append(mine[0].key)
    return found
