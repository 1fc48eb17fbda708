"""States: what an engine copies aside at a checkpoint, opaque bytes beside the rows of a prompt.

A state is a window block of one row (docs/format.md): it hangs on the block of the chain that has
the last token before the checkpoint, and is named by that row. So it is found by the prompt's
tokens, goes with its conversation, and is evicted, listed, pinned and exported as other window
blocks are. Its bytes are cut into parts of at most 16 MiB, a segment each.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate
from typing import Final

from ollama_tiering.protocol.engine.messages import StateOffer
from ollama_tiering.sidecar.engine.identity import BLOCK_TOKENS, Identity
from ollama_tiering.store import (
    TOKEN_BYTES,
    AttachedBlock,
    BlockKey,
    BlockMeta,
    BlockPlan,
    MatchedBlock,
    SegmentShape,
    block_key,
    plan_block,
    window_end_extra,
)
from ollama_tiering.store import block_store_pb2 as pb
from ollama_tiering.store.errors import CorruptBlock, InvalidBlock

PART_BYTES: Final = 16 << 20
MAX_STATE_BYTES: Final = 1 << 30
DTYPE: Final = "u8"

Found = tuple[int, AttachedBlock]  # how many tokens were computed, and the window block


def plan_state(
    identity: Identity, tokens: bytes, offer: StateOffer, keys: Sequence[BlockKey]
) -> tuple[BlockPlan, bytes]:
    """Where the bytes of a state will lie, and the block that it hangs on. `keys`: of all blocks of
    the tokens, the tail's too. InvalidBlock where it hangs on none, or is too long.
    """
    if not 1 <= offer.state_bytes <= MAX_STATE_BYTES:
        raise InvalidBlock(f"a state of {offer.state_bytes} bytes is none, or too long")
    if not 1 <= offer.n_tokens <= len(tokens) // TOKEN_BYTES:
        raise InvalidBlock(f"{offer.n_tokens} tokens are not within the prompt")
    index, row = divmod(offer.n_tokens - 1, BLOCK_TOKENS)
    sizes = [PART_BYTES] * (offer.state_bytes // PART_BYTES)
    if rest := offer.state_bytes % PART_BYTES:
        sizes.append(rest)
    plan = plan_block(
        namespace=identity.namespace,
        parent=keys[index],
        tokens=_token(tokens, offer.n_tokens),
        first_position=(index + 1) * BLOCK_TOKENS,
        shapes=[
            SegmentShape(identity.state_child, part, pb.SEGMENT_KIND_K, DTYPE, size)
            for part, size in enumerate(sizes)
        ],
        extras=[window_end_extra(identity.state_child, row)],
        cells=[0],
    )
    return plan, keys[index]


def last_state(
    identity: Identity, tokens: bytes, found: Sequence[MatchedBlock], above: int, most: int
) -> Found | None:
    """The state of most tokens, more than `above` and at most `most`, on the matched blocks."""
    firsts = accumulate((block.rows for block in found), initial=0)
    for block, first in reversed(list(zip(found, firsts, strict=False))):
        if first + block.rows <= above:
            return None
        by_key = {one.key: one for one in block.attached}
        last = min(block.rows, most - first)
        for row in reversed(range(max(0, above - first), last) if by_key else ()):
            n_tokens = first + row + 1
            extra = window_end_extra(identity.state_child, row)
            one = by_key.get(block_key(block.key, _token(tokens, n_tokens), [extra]))
            if one is not None:
                return n_tokens, one
    return None


def check_state(identity: Identity, meta: BlockMeta) -> int:
    """How many bytes the state has. CorruptBlock where the block holds something else."""
    places = [(s.child, s.layer, s.kind, s.dtype, s.encoded) for s in meta.segments]
    wanted = [
        (identity.state_child, part, pb.SEGMENT_KIND_K, DTYPE, False) for part in range(len(places))
    ]
    if meta.rows != 1 or places != wanted:
        raise CorruptBlock("the block holds no state of this engine")
    if any(s.raw_bytes != PART_BYTES for s in meta.segments[:-1]):
        raise CorruptBlock("a part of a state has another size than all have")
    return sum(segment.raw_bytes for segment in meta.segments)


def _token(tokens: bytes, n_tokens: int) -> bytes:
    """The last one before a checkpoint."""
    return tokens[(n_tokens - 1) * TOKEN_BYTES : n_tokens * TOKEN_BYTES]
