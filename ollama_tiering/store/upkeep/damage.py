"""A block that a client could not use: every copy is read again, what is damaged quarantined. The
end of a window whose other blocks are gone is dropped: while it is there nobody stores it anew.
"""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Iterator, Sequence

from ollama_tiering.store.block.blockfile import check_place, read_meta, verify_payload
from ollama_tiering.store.block.key import BlockKey, NamespaceId
from ollama_tiering.store.books.state import Level, StoreState
from ollama_tiering.store.books.tree import BlockRecord
from ollama_tiering.store.errors import CorruptBlock, UnsupportedFormat
from ollama_tiering.store.upkeep import room, unusable

log = logging.getLogger(__name__)


def check(state: StoreState, namespace: NamespaceId, key: BlockKey) -> bool:
    """True when a copy of the block was damaged and is quarantined, or parted and is dropped."""
    # Its names first: they are in the header, and looking for damage reads all of every copy.
    with _held(state, namespace, key) as (record, levels):
        if record is None:
            return False
        others = _names(record, levels)
    if others and _drop(state, record, others):
        return True
    with _held(state, namespace, key) as (record, levels):
        return record is not None and any([_damaged(state, level, record) for level in levels])


@contextlib.contextmanager
def _held(
    state: StoreState, namespace: NamespaceId, key: BlockKey
) -> Iterator[tuple[BlockRecord | None, list[Level]]]:
    """The block, not evicted meanwhile, and the levels from which its copies can be had now."""
    levels: list[Level] = []
    with state.lock:
        record = state.tree.get(key)
        if record is not None and record.namespace != namespace:
            record = None
        if record is not None:
            reached = record.levels.difference(state.resting())
            levels = [state.levels[index] for index in sorted(reached)]
            state.pin(key)
    try:
        yield record, levels
    finally:
        if record is not None:
            with state.lock:
                state.unpin(key)


def _names(record: BlockRecord, levels: Sequence[Level]) -> tuple[BlockKey, ...]:
    """The other blocks of the window that ends with this block, by the first copy that says it."""
    for level in levels if record.window else ():
        try:
            with level.tier.open(record.namespace, record.key) as block:
                return read_meta(block.read_at, block.file_bytes).others
        except (UnsupportedFormat, CorruptBlock, OSError):
            continue  # _damaged says why
    return ()


def _drop(state: StoreState, record: BlockRecord, others: Sequence[BlockKey]) -> bool:
    """Drops a window's end if one of the others is in no tier, and nobody writes it: asked in the
    hold of the lock in which it goes, for they may come at any time. False also where somebody
    reads it. A pin is no reason to keep it: it keeps what comes anew.
    """
    with state.lock:
        if state.tree.get(record.key) is not record or state.pinned(record.key):
            return False
        if not all(level.known for level in state.levels):
            return False  # the others may lie where nobody has looked yet
        if all(other in state.tree or other in state.writing for other in others):
            return False
        levels = [state.levels[index] for index in sorted(record.levels)]
        doomed = [one for level in levels if (one := state.drop_copy(level, record.key))]
    log.info("window dropped: key=%s reason=its other blocks are gone", record.key.hex())
    room.unlink(state, doomed)
    return True


def _damaged(state: StoreState, level: Level, record: BlockRecord) -> bool:
    try:
        with level.tier.open(record.namespace, record.key) as block:
            meta = read_meta(block.read_at, block.file_bytes)
            check_place(meta, record.namespace, record.key)
            verify_payload(meta, block.read_at)
    except UnsupportedFormat as error:
        unusable.set_aside(state, level, record.key, error)
    except CorruptBlock as error:
        log.warning("block damaged: key=%s reason=%s", record.key.hex(), error)
        return unusable.quarantine(state, level, record.namespace, record.key)
    except FileNotFoundError:
        with state.lock:
            state.forget_copy(level, record.key)
    except OSError as error:
        with state.lock:
            state.failed(level, error, "verify")
    return False
