"""From files to books at the start, from books to index while running.

The files are the truth: a block is known because a scan found its file. The index spares opening
it; without a row that fits, the header is read.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from typing import Final

from ollama_tiering.store import room
from ollama_tiering.store.blockfile import BlockMeta, read_meta
from ollama_tiering.store.errors import CorruptBlock, UnsupportedFormat
from ollama_tiering.store.index import BlockIndex, IndexRow
from ollama_tiering.store.key import BlockKey
from ollama_tiering.store.state import Level, StoreState
from ollama_tiering.store.tier import StoredBlock, TierKind
from ollama_tiering.store.tree import BlockRecord

log = logging.getLogger(__name__)

_DECODING: Final = 0  # no tier's number: where the index keeps the speed of decoding
_ROWS_PER_HOLD: Final = 1000  # of the lock: lookups must not wait for longer


def load(state: StoreState, index: BlockIndex | None) -> dict[BlockKey, IndexRow]:
    """Fills the books. OSError of a tier's scan passes: a store that cannot see is not opened.

    A shared tier is not looked at, that is done while serving; the rows of its blocks are returned.
    """
    rows: dict[tuple[BlockKey, int], IndexRow] = {}
    if index is not None:
        rows = {(row.key, row.tier): row for row in index.load()}
        speeds = index.load_speeds()
        state.codec.decoding.bytes_per_second = speeds.pop(_DECODING, (0.0, 0.0))[0]
        for kind, (read, write) in speeds.items():
            for level in state.levels:
                if level.tier.kind == kind:
                    level.speed.read, level.speed.write = read, write
    shared = {int(level.tier.kind) for level in state.levels if level.shared is not None}
    later = {key: rows.pop((key, tier)) for key, tier in list(rows) if tier in shared}
    found: list[tuple[BlockRecord, Level, int]] = []
    for level in state.levels:
        for stored in () if level.shared is not None else level.tier.scan():
            record = _record(state, level, stored, rows)
            if record is not None:
                found.append((record, level, stored.stored_bytes))
    depths = depths_of({record.key: record.parent for record, _, _ in found})
    found.sort(key=lambda entry: (entry[0].last_use, -depths[entry[0].key]))
    for record, level, stored_bytes in found:
        known = state.add_copy(record, level, stored_bytes)
        known.last_use = max(known.last_use, record.last_use)
        row = rows.pop((record.key, int(level.tier.kind)), None)
        if row is not None and row.stored_bytes == stored_bytes:
            state.index_changed.discard(record.key)
    state.index_changed.update(key for key, _ in rows)
    found.sort(key=lambda entry: (entry[0].last_use, depths[entry[0].key]))
    for record, _, _ in found:  # parents first: what is written down in time is a usable chain
        _queue_unsaved(state, record.key)
    for level in state.levels:
        state.count_overhead(level)
    return later


def save(state: StoreState, index: BlockIndex) -> None:
    """Writes what changed. If the database had to be made anew, writes everything."""
    with state.lock:
        if index.rebuilt:
            state.index_changed.update(record.key for record in state.tree)
            index.rebuilt = False
        changed, state.index_changed = state.index_changed, set()
        speeds = [
            (int(level.tier.kind), level.speed.read, level.speed.write) for level in state.levels
        ]
        speeds.append((_DECODING, state.codec.decoding.bytes_per_second, 0.0))
    keys = list(changed)
    for start in range(0, len(keys), _ROWS_PER_HOLD):
        part = keys[start : start + _ROWS_PER_HOLD]
        if not index.save(_rows(state, part), part):
            with state.lock:
                state.index_changed.update(keys[start:])
            return
    if keys:
        index.save_speeds(speeds)


def _rows(state: StoreState, keys: Sequence[BlockKey]) -> list[IndexRow]:
    rows = []
    with state.lock:
        for key in keys:
            record = state.tree.get(key)
            if record is not None:
                rows += [_row(record, state.levels[i]) for i in record.levels]
    return rows


def _record(
    state: StoreState,
    level: Level,
    stored: StoredBlock,
    rows: Mapping[tuple[BlockKey, int], IndexRow],
) -> BlockRecord | None:
    row = rows.get((stored.key, int(level.tier.kind)))
    fits = row is not None and (row.namespace, row.file_bytes) == (
        stored.namespace,
        stored.file_bytes,
    )
    if row is not None and fits:
        return record_of_row(row, level)
    try:
        with level.tier.open(stored.namespace, stored.key) as block:
            meta = read_meta(block.read_at, block.file_bytes)
        if (meta.namespace, meta.key) != (stored.namespace, stored.key):
            raise CorruptBlock("the file lies where another block belongs")
    except UnsupportedFormat as error:
        level.kept_bytes += stored.stored_bytes
        log.warning("block not readable here, kept: key=%s reason=%s", stored.key.hex(), error)
        return None
    except CorruptBlock as error:
        log.warning("block damaged: key=%s reason=%s", stored.key.hex(), error)
        room.quarantine(state, level, stored.namespace, stored.key)
        return None
    except OSError as error:
        level.kept_bytes += stored.stored_bytes
        log.warning("block not readable now, kept: key=%s error=%s", stored.key.hex(), error)
        return None
    return record_of_meta(meta, level, stored.modified)


def record_of_row(row: IndexRow, level: Level) -> BlockRecord:
    return BlockRecord(
        key=row.key,
        namespace=row.namespace,
        parent=row.parent,
        tokens=row.tokens,
        plain_rows=row.plain_rows,
        file_bytes=row.raw_file_bytes,
        last_use=row.last_use,
        encoded=_encoded(level, row.file_bytes, row.raw_file_bytes),
    )


def record_of_meta(meta: BlockMeta, level: Level, last_use: float) -> BlockRecord:
    return BlockRecord(
        key=meta.key,
        namespace=meta.namespace,
        parent=meta.parent,
        tokens=meta.tokens,
        plain_rows=meta.plain_rows,
        file_bytes=meta.raw_file_bytes,
        last_use=last_use,
        encoded=_encoded(level, meta.file_bytes, meta.raw_file_bytes),
    )


def _queue_unsaved(state: StoreState, key: BlockKey) -> None:
    record = state.tree.get(key)
    if record is None or key in state.unsaved:
        return
    nearest = min(record.levels)
    below = state.below(state.levels[nearest])
    in_ram = state.levels[nearest].tier.kind is TierKind.RAM
    if below is not None and below.index not in record.levels and in_ram:
        state.unsaved[key] = None


def _row(record: BlockRecord, level: Level) -> IndexRow:
    return IndexRow(
        key=record.key,
        tier=int(level.tier.kind),
        namespace=record.namespace,
        parent=record.parent,
        tokens=record.tokens,
        plain_rows=record.plain_rows,
        file_bytes=record.bytes_at(level.index),
        raw_file_bytes=record.file_bytes,
        stored_bytes=level.lru.stored_bytes(record.key),
        last_use=record.last_use,
    )


def _encoded(level: Level, file_bytes: int, raw_file_bytes: int) -> dict[int, int]:
    return {level.index: file_bytes} if file_bytes < raw_file_bytes else {}


def depths_of(parents: Mapping[BlockKey, bytes]) -> dict[BlockKey, int]:
    """Distance of every block from the first stored one of its chain."""
    depths: dict[BlockKey, int] = {}
    for key in parents:
        path = []
        at: BlockKey | None = key
        while at is not None and at not in depths:
            path.append(at)
            parent = BlockKey(parents[at])
            at = parent if parent in parents else None
        depth = depths[at] if at is not None else -1
        for step in reversed(path):
            depth += 1
            depths[step] = depth
    return depths
