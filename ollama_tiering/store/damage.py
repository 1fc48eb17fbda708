"""A block that a client found damaged: every copy is read again, what is damaged quarantined."""

from __future__ import annotations

import logging

from ollama_tiering.store import room
from ollama_tiering.store.blockfile import check_place, read_meta, verify_payload
from ollama_tiering.store.errors import CorruptBlock, UnsupportedFormat
from ollama_tiering.store.key import BlockKey, NamespaceId
from ollama_tiering.store.state import Level, StoreState
from ollama_tiering.store.tree import BlockRecord

log = logging.getLogger(__name__)


def check(state: StoreState, namespace: NamespaceId, key: BlockKey) -> bool:
    """True when a copy of the block was damaged and is quarantined now."""
    with state.lock:
        record = state.tree.get(key)
        if record is None or record.namespace != namespace:
            return False
        reached = record.levels.difference(state.resting())
        levels = [state.levels[index] for index in sorted(reached)]
        state.pin(key)
    try:
        return any([_damaged(state, level, record) for level in levels])
    finally:
        with state.lock:
            state.unpin(key)


def _damaged(state: StoreState, level: Level, record: BlockRecord) -> bool:
    try:
        with level.tier.open(record.namespace, record.key) as block:
            meta = read_meta(block.read_at, block.file_bytes)
            check_place(meta, record.namespace, record.key)
            verify_payload(meta, block.read_at)
    except UnsupportedFormat as error:
        room.set_aside(state, level, record.key, error)
    except CorruptBlock as error:
        log.warning("block damaged: key=%s reason=%s", record.key.hex(), error)
        return room.quarantine(state, level, record.namespace, record.key)
    except FileNotFoundError:
        with state.lock:
            state.forget_copy(level, record.key)
    except OSError as error:
        with state.lock:
            state.failed(level, error, "verify")
    return False
