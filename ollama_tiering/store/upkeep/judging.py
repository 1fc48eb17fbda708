"""Open a copy, read what it says it is, and judge it: one ladder for whoever comes upon a copy.

A damaged one is put out of the way. One of no use here, for its format is of another time or nobody
who may has written it, stays where it is. Weather is left to the caller: it deletes nothing.
"""

from __future__ import annotations

import enum
import logging
from dataclasses import dataclass

from ollama_tiering.store.block.blockfile import BlockMeta
from ollama_tiering.store.block.key import BlockKey, NamespaceId
from ollama_tiering.store.books import copies, suspects
from ollama_tiering.store.books.state import Level, StoreState
from ollama_tiering.store.errors import CorruptBlock, UnsupportedFormat
from ollama_tiering.store.tiers.checked import checked_meta
from ollama_tiering.store.upkeep import unusable

log = logging.getLogger(__name__)


class Verdict(enum.Enum):
    QUARANTINED = enum.auto()  # damaged, and out of the way
    DAMAGED = enum.auto()  # ... but not put out of the way: gone, or on a tier that fails
    OF_NO_USE = enum.auto()  # said and counted; its file stays
    GONE = enum.auto()
    NOT_NOW = enum.auto()  # weather


@dataclass(frozen=True, slots=True)
class Unfit:
    """A copy that cannot be had."""

    verdict: Verdict
    error: CorruptBlock | UnsupportedFormat | OSError


def look(
    state: StoreState,
    level: Level,
    namespace: NamespaceId,
    key: BlockKey,
    *,
    known: bool,
    payload: bool = False,
) -> BlockMeta | Unfit:
    """What a copy says it is; `known` as for `judge`. Without `payload` only its header is read,
    and no MAC is checked.
    """
    opened = level.tier.open if payload else level.tier.peek
    try:
        with opened(namespace, key) as block:
            return checked_meta(block, namespace, key, payload=payload)
    except (UnsupportedFormat, CorruptBlock, OSError) as error:
        return Unfit(judge(state, level, namespace, key, error, known=known), error)


def judge(
    state: StoreState,
    level: Level,
    namespace: NamespaceId,
    key: BlockKey,
    error: CorruptBlock | UnsupportedFormat | OSError,
    *,
    known: bool,
) -> Verdict:
    """Acts on what reading a copy has shown. `known`: the copy is in the books, and leaves them if
    it is of no use or gone. OSError where a damaged one cannot be put out of the way.
    """
    if known and (isinstance(error, FileNotFoundError) or not isinstance(error, OSError)):
        suspects.came_upon(state, key, damaged=not isinstance(error, OSError))
    if isinstance(error, UnsupportedFormat):
        unusable.say_unusable(state, level, key, error)
        if known:
            copies.set_aside(state, level, key)
        return Verdict.OF_NO_USE
    if isinstance(error, CorruptBlock):
        log.warning("block damaged: key=%s reason=%s", key.hex(), error)
        done = unusable.quarantine(state, level, namespace, key)
        return Verdict.QUARANTINED if done else Verdict.DAMAGED
    if isinstance(error, FileNotFoundError):
        if known:
            copies.forget(state, level, key)
        return Verdict.GONE
    return Verdict.NOT_NOW
