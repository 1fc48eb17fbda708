"""Takes index into books at the start, and books into the index while running.

The files are the truth and the survey (survey.py) asks them; the index lets the store answer before
that is done, and spares opening every file.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Final

from ollama_tiering.store.block.blockfile import BlockMeta
from ollama_tiering.store.block.description import Fields
from ollama_tiering.store.block.key import BlockKey, NamespaceId
from ollama_tiering.store.books import changes, copies
from ollama_tiering.store.books.state import Level, StoreState
from ollama_tiering.store.books.terms import TermsTable
from ollama_tiering.store.books.tree import BlockRecord
from ollama_tiering.store.tiers import kinds
from ollama_tiering.store.tiers.description_file import read_description
from ollama_tiering.store.tiers.walk import namespaces
from ollama_tiering.store.upkeep.index import HEADROOM_BYTES, BlockIndex, IndexRow

log = logging.getLogger(__name__)

_SMALL_FILES_BYTES: Final = 12 << 10  # the count of today's writes, twice while it is replaced
_ROWS_PER_PART: Final = 250  # of one transaction and one hold of the lock; see HEADROOM_BYTES
_DECODING: Final = 0  # no tier's number: where the index keeps the speed of decoding


def keep_headroom(state: StoreState, index_path: Path | None) -> None:
    """Files beside the blocks grow between two looks at them: that much is kept free."""
    for level in state.levels:
        if level.tier.directory is not None and level.tier.wears_disk:
            level.headroom_bytes = _SMALL_FILES_BYTES
        if index_path is not None and level.tier.directory == index_path.parent:
            level.headroom_bytes += HEADROOM_BYTES


def learn_described(table: TermsTable, directories: Iterable[Path | None]) -> None:
    """The namespaces that have a description below these directories. What cannot be read is not
    known; a shared directory may hang and is none of them.
    """
    for directory in directories:
        try:
            found = [name for name, _ in namespaces(directory)] if directory is not None else []
        except OSError:
            continue
        for namespace in found:
            if namespace is None or directory is None:
                continue
            fields: Fields = read_description(directory, namespace)
            if fields:
                table.learn_described(namespace, fields)


def load(
    state: StoreState, index: BlockIndex | None, *, absent_remote: bool = False
) -> dict[BlockKey, IndexRow]:
    """Fills the books with what the index says. Nobody else uses the state yet.

    A shared tier is looked at while serving: the rows of its blocks are returned instead. So are
    those of a remote tier that could not be opened.
    """
    for level in state.levels:
        level.surveyed = level.shared is not None
    if index is None:
        return {}
    levels = {int(level.tier.kind): level for level in state.levels}
    speeds = index.load_speeds()
    state.encodings.decoding.bytes_per_second = speeds.pop(_DECODING, (0.0, 0.0))[0]
    for kind, (read, write) in speeds.items():
        if kind in levels:
            levels[kind].speed.read, levels[kind].speed.write = read, write
    namespaces: dict[bytes, NamespaceId] = {}
    later: dict[BlockKey, IndexRow] = {}
    parents: dict[BlockKey, bytes] = {}
    loaded: list[tuple[BlockRecord, Level, int]] = []
    for row in index.load():
        known = levels.get(row.tier)
        if known is None and absent_remote and row.tier in kinds.SHARED:
            later[row.key] = row
        elif known is None:
            state.index_changed.add(row.key)
        elif known.shared is not None:
            later[row.key] = row
        else:
            namespace = namespaces.setdefault(row.namespace, row.namespace)
            loaded.append((record_of_row(row, known, namespace), known, row.stored_bytes))
            parents[row.key] = row.parent
    depths = depths_of(parents)
    for record, _, _ in sorted(loaded, key=lambda copy: depths[copy[0].key]):
        state.tree.add(record)  # parents first: what they know of their children is not stored
    # Leaves first among those used together: they are the first to be evicted.
    loaded.sort(key=lambda copy: (copy[0].last_use, -depths[copy[0].key]))
    changed = set(state.index_changed)
    for record, level, stored_bytes in loaded:
        state.add_copy(record, level, stored_bytes)
    state.index_changed = changed
    return later


def save(state: StoreState, index: BlockIndex) -> None:
    """Writes what changed. If the database had to be made anew, writes everything."""
    changed = changes.take_changes(state, everything=index.rebuilt)
    index.rebuilt = False
    speeds = [(int(level.tier.kind), level.speed.read, level.speed.write) for level in state.levels]
    speeds.append((_DECODING, state.encodings.decoding.bytes_per_second, 0.0))
    keys = sorted(changed)  # neighbours share pages of the database
    for start in range(0, len(keys), _ROWS_PER_PART):
        part = keys[start : start + _ROWS_PER_PART]
        saved = index.save(changes.each_copy(state, part, _row), part)
        count_files(state)
        if not saved:
            changes.note_changes(state, keys[start:])
            return
    if keys:
        index.save_speeds(speeds)
        index.compact()
        count_files(state)


def count_files(state: StoreState) -> None:
    """Looks at what index and count of writes take of a tier's budget now. OSError is weather."""
    for level in state.levels:
        if level.headroom_bytes:
            try:
                level.tier.measure_overhead()
            except OSError as error:
                log.debug("not measured: tier=%s error=%s", level.tier.kind.label, error)
            copies.recount(state, level)


def record_of_row(row: IndexRow, level: Level, namespace: NamespaceId | None = None) -> BlockRecord:
    namespace = namespace or row.namespace
    return BlockRecord(
        key=row.key,
        namespace=namespace,
        parent=namespace if row.parent == namespace else row.parent,
        tokens=row.tokens,
        plain_rows=row.plain_rows,
        file_bytes=row.raw_file_bytes,
        last_use=row.last_use,
        created=row.created,
        hits=row.hits,
        encoded=_encoded(level, row.file_bytes, row.raw_file_bytes),
        fingerprint=row.fingerprint,
    )


def record_of(meta: BlockMeta, last_use: float) -> BlockRecord:
    return BlockRecord(
        key=meta.key,
        namespace=meta.namespace,
        parent=meta.parent,
        tokens=meta.tokens,
        plain_rows=meta.plain_rows,
        file_bytes=meta.raw_file_bytes,
        last_use=last_use,
        created=float(meta.created_unix_seconds),
        fingerprint=meta.fingerprint,
    )


def record_of_meta(meta: BlockMeta, level: Level, last_use: float) -> BlockRecord:
    record = record_of(meta, last_use)
    record.encoded = _encoded(level, meta.file_bytes, meta.raw_file_bytes)
    return record


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
        created=record.created,
        hits=record.hits,
        fingerprint=record.fingerprint,
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
