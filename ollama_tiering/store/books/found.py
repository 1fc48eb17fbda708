"""Files that a look at a tier found, compared with the books. Each verb takes the lock."""

from __future__ import annotations

import enum
from collections.abc import Collection, Iterable, Sequence

from ollama_tiering.store.block.key import BlockKey
from ollama_tiering.store.books.state import Level, StoreState
from ollama_tiering.store.books.tree import BlockRecord
from ollama_tiering.store.tiers.contract import StoredBlock


class FileIs(enum.Enum):
    KNOWN = enum.auto()  # as the books have it
    LEAVING = enum.auto()  # about to be unlinked
    UNKNOWN = enum.auto()


def compare(state: StoreState, level: Level, stored: StoredBlock, seen: set[BlockKey]) -> FileIs:
    """`seen` are blocks of which a file was found already, and takes this one's key if it is known;
    its size is the file's from now on.
    """
    with state.lock:
        if stored.key not in seen and _known(state, level, stored):
            seen.add(stored.key)
            return FileIs.KNOWN
        return FileIs.LEAVING if state.is_leaving(level, stored.key) else FileIs.UNKNOWN


def all_counted(
    state: StoreState, level: Level, seen: Collection[BlockKey], unknown_bytes: int
) -> None:
    """Every file of the level was compared: what has none is forgotten, what is unknown counts."""
    with state.lock:
        for key in [key for key in level.lru if key not in seen]:
            state.forget_copy(level, key)
        level.kept_bytes += unknown_bytes
        level.surveyed = True
        state.count_overhead(level)


def enter(
    state: StoreState, level: Level, stored: StoredBlock, record: BlockRecord | None, *, stays: bool
) -> None:
    """An unknown file was read: it is a block, or none. `stays`: it is none and is still there; its
    bytes go on counting.
    """
    with state.lock:
        if not stays:
            level.kept_bytes -= stored.stored_bytes
        if record is not None:
            known = state.tree.get(record.key)
            there = known is not None and level.index in known.levels
            if not there and not state.is_leaving(level, record.key):
                state.add_copy(record, level, stored.stored_bytes, oldest=True)
        state.count_overhead(level)


def demote_orphans(state: StoreState, records: Iterable[BlockRecord]) -> set[BlockKey]:
    """Blocks among these no prompt can reach, for what comes before them is gone, with all below
    them: they are the first to be evicted from now on, leaves before the others.
    """
    orphans: set[BlockKey] = set()
    with state.lock:
        for record in records:
            if record.parent != record.namespace and record.parent not in state.tree:
                waiting = [record]
                for one in waiting:
                    orphans.add(one.key)
                    for index in one.levels:
                        state.levels[index].lru.demote(one.key)
                    waiting += state.tree.children(one.key)
    return orphans


def want_saved(state: StoreState, but: Collection[BlockKey]) -> None:
    """Blocks that lie in the first level only are worth the one below it, but for these."""
    top = state.levels[0]
    if state.below(top) is None:
        return
    with state.lock:
        for key in list(top.lru):
            record = state.tree.get(key)
            if record is not None and len(record.levels) == 1 and key not in but:
                state.admission.committed(record, top, tail=False)


def keys_at(state: StoreState, level: Level) -> set[BlockKey]:
    with state.lock:
        return set(level.lru)


def adopt(
    state: StoreState, level: Level, record: BlockRecord, stored_bytes: int
) -> BlockRecord | None:
    """A block that another sidecar stored on a shared level; the record that stands for it now.
    None: it is to be removed from there.
    """
    assert level.shared is not None
    with state.lock:
        if (record.namespace, record.key) in level.shared.doomed:
            return None
        return state.add_copy(record, level, stored_bytes)


def passed_over_before(state: StoreState, level: Level, stored: StoredBlock) -> bool:
    """Whether a file of a shared level could not be used before, and is the same file still."""
    assert level.shared is not None
    now = (stored.file_bytes, stored.modified)
    with state.lock:
        before = level.shared.passed_over.get(stored.key, (-1, 0.0))
        if before is None or before == now:
            level.shared.passed_over[stored.key] = now
            return True
    return False


def pass_over(state: StoreState, level: Level, stored: StoredBlock) -> None:
    """A file of a shared level that cannot be used as it is."""
    assert level.shared is not None
    with state.lock:
        level.shared.passed_over[stored.key] = (stored.file_bytes, stored.modified)


def looked_through(
    state: StoreState,
    level: Level,
    passed_over: Sequence[BlockKey] | set[BlockKey],
    kept_bytes: int,
    foreign_bytes: int,
) -> None:
    """All of a shared level was seen: these files could not be used, that much is not ours."""
    books = level.shared
    assert books is not None
    with state.lock:
        before = books.passed_over
        books.passed_over = {key: before[key] for key in passed_over if key in before}
        level.kept_bytes = kept_bytes
        books.foreign_bytes = foreign_bytes
        state.count_overhead(level)


def _known(state: StoreState, level: Level, stored: StoredBlock) -> bool:
    record = state.tree.get(stored.key)
    if record is None or level.index not in record.levels:
        return False
    file = (record.namespace, record.bytes_at(level.index))
    if file != (stored.namespace, stored.file_bytes):
        return False
    counted_bytes = level.lru.stored_bytes(stored.key)
    if counted_bytes != stored.stored_bytes:
        level.count(stored.namespace, stored.stored_bytes - counted_bytes)
        level.lru.resize(stored.key, stored.stored_bytes)
        state.index_changed.add(stored.key)
    return True
