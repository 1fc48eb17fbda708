"""What a writer says about a block before and after filling it, and the checks of it. Pure."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum
from pathlib import Path

from ollama_tiering.store.block.blockfile import MAX_FILE_BYTES, BlockMeta
from ollama_tiering.store.block.key import BlockKey, NamespaceId
from ollama_tiering.store.block.segments import ALIGNMENT
from ollama_tiering.store.block.window_fields import has_window_extra
from ollama_tiering.store.errors import InvalidBlock


class Outcome(Enum):
    RESERVED = "reserved"
    PRESENT = "present"
    NO_ROOM = "no room"  # nothing may be evicted for it, or too many are reserved already
    REFUSED = "refused"  # by admission (not now, not on this disk) or by a rule


@dataclass(frozen=True, slots=True)
class BlockOffer:
    key: BlockKey
    parent: bytes
    file_bytes: int
    tail: bool = False


@dataclass(frozen=True, slots=True)
class Reserved:
    outcome: Outcome
    reservation_id: int = 0
    path: Path | None = None
    reason: str = ""  # why it is refused, where a rule does


@dataclass(frozen=True, slots=True)
class CommitResult:
    stored: bool
    reason: str = ""


def check_offer(offer: BlockOffer) -> None:
    if not 2 * ALIGNMENT <= offer.file_bytes <= MAX_FILE_BYTES or offer.file_bytes % ALIGNMENT:
        raise InvalidBlock(f"{offer.file_bytes} bytes cannot be the size of a block file")


def check_meta(
    meta: BlockMeta, offer: BlockOffer, namespace: NamespaceId, block_tokens: int
) -> None:
    if meta.namespace != namespace:
        raise InvalidBlock("the header is of another namespace")
    if meta.key != offer.key or meta.parent != offer.parent:
        raise InvalidBlock("the header is of another block than was reserved")
    if meta.encoded:
        raise InvalidBlock("a client stores blocks raw; the tiers encode them")
    if meta.file_bytes != offer.file_bytes:
        raise InvalidBlock("the file has another size than was reserved")
    if meta.rows > block_tokens or (meta.rows < block_tokens) != offer.tail:
        raise InvalidBlock(f"{meta.rows} rows do not fit the reservation")
    if meta.first_position % block_tokens or (meta.first_position == 0) != (
        meta.parent == namespace
    ):
        raise InvalidBlock(f"position {meta.first_position} does not fit the block's place")
    if meta.cells and not (meta.first_position and has_window_extra(meta.extras)):
        raise InvalidBlock("it has cells, and is no window block otherwise")
