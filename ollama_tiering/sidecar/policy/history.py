"""Which of the stored histories of a prompt an engine gets, and from which row on."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from ollama_tiering.store import (
    TOKEN_BYTES,
    BlockExtra,
    MatchedBlock,
    NamespaceId,
    TieredStore,
    block_key,
    extras_of,
)


@dataclass(frozen=True, slots=True)
class Sought:
    """A prompt of which an engine's slot holds the first `memory_rows`, and may restore `most`.

    by_rows: tokens do not decide the bits of rows. `fingerprints` say which rows the slot's first
    blocks are, as far as that is known.
    """

    namespace: NamespaceId
    tokens: bytes
    block_tokens: int
    most: int
    memory_rows: int
    min_tokens: int
    extras: Sequence[BlockExtra] = ()
    by_rows: bool = True
    fingerprints: tuple[bytes, ...] = ()


class History(NamedTuple):
    """`held`: so many leading blocks are those that the slot holds, bit by bit. `use` counts the
    look-up, once it is answered.
    """

    blocks: list[MatchedBlock]
    held: int
    use: Callable[[], None]


def find(store: TieredStore, sought: Sought) -> History:
    """The history that gains most: one that goes on from the rows that the slot holds; if there is
    none, or nobody knows which rows these are, another one takes their place.
    """
    held = sought.memory_rows // sought.block_tokens
    known = sought.fingerprints[:held] if sought.by_rows else ()
    least = sought.memory_rows + sought.min_tokens
    blocks, use = store.find_history(
        sought.namespace, sought.tokens, sought.block_tokens, sought.extras, known, least
    )
    if blocks:
        blocks[-1] = _whole(sought, blocks[-1], len(blocks) - 1, blocks)
    if not sought.by_rows:
        return History(blocks, held, use)
    same = 0
    while same < min(len(known), len(blocks)) and blocks[same].fingerprint == known[same]:
        same += 1
    return History(blocks, same, use)


def _whole(
    sought: Sought, block: MatchedBlock, index: int, blocks: Sequence[MatchedBlock]
) -> MatchedBlock:
    """The last block: matched by its tokens, and only up to what stands beside one. If the prompt
    has all of its tokens, its key says whether it has the same beside them.
    """
    first = index * sought.block_tokens
    tokens = sought.tokens[first * TOKEN_BYTES : (first + block.block_rows) * TOKEN_BYTES]
    if (
        block.rows == block.block_rows
        or not sought.extras
        or len(tokens) < block.block_rows * TOKEN_BYTES
    ):
        return block
    parent: bytes = blocks[index - 1].key if index else sought.namespace
    extras = extras_of(sought.extras, first, block.block_rows)
    if block_key(parent, tokens, extras, block.fingerprint) != block.key:
        return block
    return block._replace(rows=block.block_rows)
