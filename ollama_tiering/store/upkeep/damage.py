"""A block that a client could not use: every copy is read again, what is damaged quarantined. The
end of a window whose other blocks are gone is dropped: while it is there nobody stores it anew.
"""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Iterator, Sequence

from ollama_tiering.store.block.key import BlockKey, NamespaceId
from ollama_tiering.store.books import copies, weather
from ollama_tiering.store.books.state import Level, StoreState
from ollama_tiering.store.books.tree import BlockRecord
from ollama_tiering.store.errors import CorruptBlock, UnsupportedFormat
from ollama_tiering.store.tiers.checked import checked_meta
from ollama_tiering.store.upkeep import judging, unlinking, unusable
from ollama_tiering.store.upkeep.judging import Verdict

log = logging.getLogger(__name__)


def check(state: StoreState, namespace: NamespaceId, key: BlockKey) -> bool:
    """Returns True if a copy was damaged and is quarantined, or parted and is dropped."""
    # Its names first: they are in the header, and looking for damage reads all of every copy.
    with _held(state, namespace, key) as (record, levels):
        if record is None:
            return False
        others = _names(record, levels)
    if others and _drop(state, record, others):
        return True
    with _held(state, namespace, key) as (record, levels):
        return record is not None and any([_damaged(state, level, record) for level in levels])


def put_aside(state: StoreState, namespace: NamespaceId, key: BlockKey) -> None:
    """Quarantines every copy that can be had, whose bytes are what was stored but not what should
    have been: no prompt gets what follows it either. An OSError is said and leaves a copy.
    """
    with _held(state, namespace, key) as (_, levels):
        for level in levels:
            try:
                unusable.quarantine(state, level, namespace, key)
            except OSError as error:
                said = "wrong rows stay: key=%s tier=%s reason=%s"
                log.error(said, key.hex(), level.tier.kind.label, error.strerror)


@contextlib.contextmanager
def _held(
    state: StoreState, namespace: NamespaceId, key: BlockKey
) -> Iterator[tuple[BlockRecord | None, list[Level]]]:
    """The block, not evicted meanwhile, and the levels from which its copies can be had now."""
    found = copies.in_reach(state, namespace, key)
    if found is None:
        yield None, []
        return
    try:
        yield found
    finally:
        copies.let_go(state, [key])


def _names(record: BlockRecord, levels: Sequence[Level]) -> tuple[BlockKey, ...]:
    """The other blocks of the window that ends with this block, by the first copy that says it."""
    for level in levels if record.window else ():
        try:
            with level.tier.open(record.namespace, record.key) as block:
                return checked_meta(block, record.namespace, record.key).others
        except (UnsupportedFormat, CorruptBlock, OSError):
            continue  # _damaged says why
    return ()


def _drop(state: StoreState, record: BlockRecord, others: Sequence[BlockKey]) -> bool:
    """Drops the end of a window if another of its blocks is in no tier."""
    doomed = copies.drop_parted(state, record, others)
    if not doomed:
        return False
    log.info("window dropped: key=%s reason=its other blocks are gone", record.key.hex())
    unlinking.unlink(state, doomed)
    return True


def _damaged(state: StoreState, level: Level, record: BlockRecord) -> bool:
    found = judging.look(state, level, record.namespace, record.key, known=True, payload=True)
    if not isinstance(found, judging.Unfit):
        return False
    if found.verdict is Verdict.NOT_NOW:
        assert isinstance(found.error, OSError)
        weather.failed(state, level, found.error, "verify")
    return found.verdict is Verdict.QUARANTINED
