"""What the header of a window block has beside what any block's has (docs/format.md). Pure."""

from __future__ import annotations

from collections.abc import Sequence

from ollama_tiering.store.block.key import DIGEST_BYTES, BlockExtra
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
