"""Windows that come back as a whole, in the cells that they lay in: those of the Go engines.

Each is found by the block that ends it, which names the others (docs/format.md). States are windows
of one row.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

from ollama_tiering.store import (
    TOKEN_BYTES,
    AttachedBlock,
    MatchedBlock,
    block_key,
    window_end_extra,
)


class WindowCache(NamedTuple):
    """A cache child that keeps `size` rows before a position."""

    child: int
    size: int
    row_bytes: int


class WindowEnds(NamedTuple):
    """A position at which all windows are stored, with the last block of each."""

    at: int
    blocks: list[AttachedBlock]
    seconds: float  # expected, for all of their blocks
    bytes: int


def last_windows(
    found: Sequence[MatchedBlock],
    tokens: bytes,
    block_tokens: int,
    caches: Sequence[WindowCache],
    least: int,
    most: int,
    resumable: Callable[[int], bool],
) -> WindowEnds | None:
    """Those of the last position in [least, most] at which an engine may go on."""
    for index in reversed(range(min(len(found), -(-most // block_tokens)))):
        first = index * block_tokens
        if first + block_tokens < least:
            break
        if not found[index].attached:
            continue
        for at in range(min(most, first + block_tokens), max(first, least - 1), -1):
            if resumable(at) and (ends := _ends(found[index], tokens, first, caches, at)):
                return ends
    return None


def _ends(
    on: MatchedBlock, tokens: bytes, first: int, caches: Sequence[WindowCache], at: int
) -> WindowEnds | None:
    """The last blocks of all windows that end at a position, if they hang on this block."""
    blocks = []
    seconds, size = 0.0, 0
    for cache in caches:
        begin = max(at - cache.size, first)
        extra = window_end_extra(cache.child, begin - first)
        key = block_key(on.key, tokens[begin * TOKEN_BYTES : at * TOKEN_BYTES], [extra])
        block = next((one for one in on.attached if one.key == key), None)
        if block is None:
            return None
        blocks.append(block)
        rows = min(at, cache.size)
        # The other blocks are known when this one is read; they lie where it does, as a rule.
        seconds += block.expected_seconds * rows / (at - begin)
        size += rows * cache.row_bytes
    return WindowEnds(at, blocks, seconds, size)
