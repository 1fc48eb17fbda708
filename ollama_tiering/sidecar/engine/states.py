"""States and windows: opaque bytes of an engine beside the rows of a prompt.

A state is what it copies aside at a checkpoint. A window is the rows of one block in the layers
that keep only the last ones; with those of enough blocks before a position it resumes there.

Both are window blocks of one row (docs/format.md). A state hangs on the block of the chain that has
the last token before the checkpoint, and is named by that row. So it is found by the prompt's
tokens, goes with its conversation, and is evicted, listed, pinned and exported as other window
blocks are. Its bytes are cut into parts of at most 16 MiB, a segment each.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate
from typing import Final, NamedTuple

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
    window_extra,
)
from ollama_tiering.store import block_store_pb2 as pb
from ollama_tiering.store.errors import CorruptBlock, InvalidBlock

PART_BYTES: Final = 16 << 20
MAX_STATE_BYTES: Final = 1 << 30
DTYPE: Final = "u8"

Found = tuple[int, AttachedBlock]  # how many tokens were computed, and the window block


class StatePiece(NamedTuple):
    """The window of one block."""

    first: int  # position
    rows: int
    block: AttachedBlock


Window = tuple[int, list[StatePiece]]  # the position that they are for


def plan_state(
    identity: Identity, tokens: bytes, offer: StateOffer, keys: Sequence[BlockKey]
) -> tuple[BlockPlan, bytes]:
    """Where the bytes of a state will lie, and the block that it hangs on. `keys`: of all blocks of
    the tokens, the tail's too. InvalidBlock where it hangs on none, or is too long.
    """
    if not 1 <= offer.state_bytes <= MAX_STATE_BYTES:
        raise InvalidBlock(f"a state of {offer.state_bytes} bytes is none, or too long")
    if not 1 <= offer.n_tokens <= len(tokens) // TOKEN_BYTES:
        raise InvalidBlock(f"token {offer.n_tokens} is not within the prompt")
    index, row = divmod(offer.n_tokens - 1, BLOCK_TOKENS)
    plan = plan_block(
        namespace=identity.namespace,
        parent=keys[index],
        tokens=_token(tokens, offer.n_tokens),
        first_position=(index + 1) * BLOCK_TOKENS,
        shapes=_parts(identity.state_child, offer.state_bytes),
        extras=[window_end_extra(identity.state_child, row)],
        cells=[0],
    )
    return plan, keys[index]


def plan_window(
    identity: Identity, tokens: bytes, first: int, keys: Sequence[BlockKey]
) -> tuple[BlockPlan, bytes]:
    """As `plan_state`, of the block that begins at a position. It is named by the block's first
    token, which a prompt has that goes on with a part of the block, too. InvalidBlock.
    """
    rows = min(len(tokens) // TOKEN_BYTES - first, BLOCK_TOKENS)
    if not identity.window_row_bytes or first % BLOCK_TOKENS or rows < 1:
        raise InvalidBlock(f"no block with a window begins at {first}")
    index = first // BLOCK_TOKENS
    plan = plan_block(
        namespace=identity.namespace,
        parent=keys[index],
        tokens=_token(tokens, first + 1),
        first_position=first + BLOCK_TOKENS,
        shapes=_parts(window_child(identity), rows * identity.window_row_bytes),
        extras=[window_extra(window_child(identity), 0, [rows])],
        cells=[rows],
    )
    return plan, keys[index]


def last_window(
    identity: Identity, tokens: bytes, found: Sequence[MatchedBlock], above: int, most: int
) -> Window | None:
    """The windows before the greatest position, more than `above` and at most `most`, that has
    enough of them; of those that follow one another as many as the engine keeps. A position with
    fewer rows before it than `window_least` has none: there the engine goes on at states only.
    """
    firsts = list(accumulate((block.rows for block in found), initial=0))
    run: list[StatePiece] = []
    end = 0
    for block, first in reversed(list(zip(found, firsts, strict=False))):
        one = _window_of(identity, tokens, block, first) if first < most else None
        if one is None:
            if run and run[0].first + identity.window_least <= end:
                break
            run = []
            continue
        if not run:
            end = min(first + block.rows, most)
        if end <= above or end - first > identity.window_most:
            break
        run.insert(0, one)
    if end <= above or not run or run[0].first + identity.window_least > end:
        return None
    return end, run


def _window_of(
    identity: Identity, tokens: bytes, block: MatchedBlock, first: int
) -> StatePiece | None:
    if not block.attached:
        return None
    extra = window_extra(window_child(identity), 0, [block.block_rows])
    key = block_key(block.key, _token(tokens, first + 1), [extra])
    one = next((one for one in block.attached if one.key == key), None)
    return None if one is None else StatePiece(first, block.block_rows, one)


def window_child(identity: Identity) -> int:
    return identity.state_child + 1


def _parts(child: int, count: int) -> list[SegmentShape]:
    """Of so many bytes."""
    sizes = [PART_BYTES] * (count // PART_BYTES)
    if rest := count % PART_BYTES:
        sizes.append(rest)
    return [
        SegmentShape(child, part, pb.SEGMENT_KIND_K, DTYPE, size) for part, size in enumerate(sizes)
    ]


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
    """How many bytes the state or window has. CorruptBlock where the block holds neither."""
    child = meta.segments[0].child if meta.segments else 0
    if identity.window_row_bytes and child == window_child(identity):
        if identity.window_row_bytes * meta.cells[0] != sum(s.raw_bytes for s in meta.segments):
            raise CorruptBlock("the block holds a window of other rows")
    elif child != identity.state_child:
        raise CorruptBlock("the block holds no state of this engine")
    places = [(s.child, s.layer, s.kind, s.dtype, s.encoded) for s in meta.segments]
    wanted = [(child, part, pb.SEGMENT_KIND_K, DTYPE, False) for part in range(len(places))]
    if meta.rows != 1 or places != wanted:
        raise CorruptBlock("the block holds no state of this engine")
    if any(s.raw_bytes != PART_BYTES for s in meta.segments[:-1]):
        raise CorruptBlock("a part of a state has another size than all have")
    return sum(segment.raw_bytes for segment in meta.segments)


def _token(tokens: bytes, n_tokens: int) -> bytes:
    """The last one before a checkpoint."""
    return tokens[(n_tokens - 1) * TOKEN_BYTES : n_tokens * TOKEN_BYTES]
