"""A block that a client could not use: every copy is read again, what is damaged quarantined. The
end of a window whose other blocks are gone is dropped: while it is there nobody stores it anew.
"""

from __future__ import annotations

import logging

from ollama_tiering.store.block.blockfile import check_place, read_meta, verify_payload
from ollama_tiering.store.block.key import BlockKey, NamespaceId
from ollama_tiering.store.books.state import Level, StoreState
from ollama_tiering.store.books.tree import BlockRecord
from ollama_tiering.store.errors import CorruptBlock, UnsupportedFormat
from ollama_tiering.store.upkeep import room, unusable

log = logging.getLogger(__name__)


def check(state: StoreState, namespace: NamespaceId, key: BlockKey) -> bool:
    """True when a copy of the block was damaged and is quarantined, or parted and is dropped."""
    with state.lock:
        record = state.tree.get(key)
        if record is None or record.namespace != namespace:
            return False
        reached = record.levels.difference(state.resting())
        levels = [state.levels[index] for index in sorted(reached)]
        state.pin(key)
    try:
        if any([_damaged(state, level, record) for level in levels]):
            return True
        parted = record.window and any(_names_missing(state, level, record) for level in levels)
    finally:
        with state.lock:
            state.unpin(key)
    return parted and _drop(state, record)


def _names_missing(state: StoreState, level: Level, record: BlockRecord) -> bool:
    """Whether the window that ends with this block names one that lies in no tier."""
    if not all(one.known for one in state.levels):
        return False  # it may lie where nobody has looked yet
    try:
        with level.tier.open(record.namespace, record.key) as block:
            others = read_meta(block.read_at, block.file_bytes).others
    except (UnsupportedFormat, CorruptBlock, OSError):
        return False  # it was there a moment ago: another time
    with state.lock:
        return any(state.tree.get(other) is None for other in others)


def _drop(state: StoreState, record: BlockRecord) -> bool:
    """False where somebody reads it. A pin is no reason to keep it: it keeps what comes anew."""
    with state.lock:
        if state.tree.get(record.key) is not record or state.pinned(record.key):
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
