"""What the header of a window block has beside what any block's has (docs/format.md). Pure.

At which row a window ends is in no field of its own: it is in the name of its last block, which is
read once, when a header is. Books and index have it in the place of `plain_rows`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import lru_cache

from ollama_tiering.store.block.key import (
    DEFAULT_BLOCK_TOKENS,
    DIGEST_BYTES,
    BlockExtra,
    window_end_extra,
)
from ollama_tiering.store.block.pb import block_store_pb2 as pb
from ollama_tiering.store.errors import CorruptBlock


def check_window_fields(header: pb.BlockHeader, rows: int) -> None:
    """CorruptBlock for what no writer makes."""
    if header.cells and len(header.cells) != rows:
        raise CorruptBlock(f"{len(header.cells)} cells are not one for each of {rows} rows")
    if header.window and not header.cells:
        raise CorruptBlock("a block without cells names the blocks of a window")
    if any(len(key) != DIGEST_BYTES for key in header.window):
        raise CorruptBlock(f"a key in window has not {DIGEST_BYTES} bytes")


def has_window_extra(extras: Sequence[BlockExtra]) -> bool:
    """Whether they are those of a window block: one, at the first row."""
    return [(extra.row, len(extra.digest)) for extra in extras] == [(0, DIGEST_BYTES)]


def plain_rows_of_window(extras: Sequence[BlockExtra], child: int, rows: int) -> int:
    """What the books have for a window block of so many rows of a cache child: -1, or less by the
    row of its parent at which a window ends with it (1 for the first).
    """
    first = _ends(child).get(extras[0].digest) if has_window_extra(extras) else None
    return -1 if first is None else -1 - first - rows


def end_row(plain_rows: int) -> int:
    """The row of its parent at which a window ends with a block; 0: none does, as far as is known.
    An index of before has -1 for all: their namespaces are those of another build's.
    """
    return max(0, -1 - plain_rows)


@lru_cache(maxsize=32)
def _ends(child: int) -> Mapping[bytes, int]:
    """First row by what names a block that a window ends with."""
    return {window_end_extra(child, row).digest: row for row in range(DEFAULT_BLOCK_TOKENS)}
