"""Which blocks are restored, and why not more of a prompt."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from ollama_tiering.store import MatchedBlock
from ollama_tiering.store import block_store_pb2 as pb


class PlannedBlock(NamedTuple):  # made by the hundred
    """The first `rows` of a block, which begins at position `first`."""

    block: MatchedBlock
    first: int
    rows: int

    @property
    def bytes(self) -> int:
        """To be copied, however the tier keeps them."""
        return max(self.block.stored_bytes, self.block.raw_bytes)


class End(NamedTuple):
    """How many rows can be restored; why not more (Shortfall), and from which position on."""

    rows: int
    reason: int
    at: int


def end_of(found: Sequence[MatchedBlock], most: int) -> End:
    """Of `most` rows that may be restored."""
    rows = min(sum(block.rows for block in found), most)
    if rows >= most:
        return End(rows, pb.SHORTFALL_UNSPECIFIED, 0)
    if not rows:
        return End(0, pb.SHORTFALL_NOTHING_STORED, 0)
    differs = found[-1].rows < found[-1].block_rows
    return End(rows, pb.SHORTFALL_DIFFERS if differs else pb.SHORTFALL_ENDS, rows)


def planned(
    found: Sequence[MatchedBlock], start: int, rows: int, block_tokens: int
) -> list[PlannedBlock]:
    """The blocks that hold positions `start` to rows - 1."""
    blocks = []
    for index in range(start // block_tokens, len(found)):
        first = index * block_tokens
        if first >= rows:
            break
        block = found[index]
        blocks.append(PlannedBlock(block, first, min(block.rows, rows - first)))
    return blocks
