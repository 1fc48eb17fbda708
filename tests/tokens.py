"""What tests ask of tokens and keys, and the product does not."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from ollama_tiering.store.block.key import (
    TOKEN_BYTES,
    BlockExtra,
    BlockKey,
    NamespaceId,
    block_key,
    prefix_chain,
)


def tokens_from_bytes(data: bytes) -> list[int]:
    return [int(token) for token in np.frombuffer(data, dtype="<i4")]


def tail_key(
    namespace: NamespaceId, tokens: bytes, block_tokens: int, extras: Sequence[BlockExtra] = ()
) -> BlockKey | None:
    """The key of the tail block; None if the tokens end at the end of a block."""
    chain = prefix_chain(namespace, tokens, block_tokens, extras)
    start = len(chain) * block_tokens
    rest = tokens[start * TOKEN_BYTES :]
    if not rest:
        return None
    inside = [BlockExtra(e.row - start, e.digest) for e in extras if e.row >= start]
    return block_key(chain[-1] if chain else namespace, rest, sorted(inside, key=lambda e: e.row))
