"""What changed in the books since the index was written. Each verb takes the lock."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import TypeVar

from ollama_tiering.store.block.key import BlockKey
from ollama_tiering.store.books.state import Level, StoreState
from ollama_tiering.store.books.tree import BlockRecord

T = TypeVar("T")


def take_changes(state: StoreState, *, everything: bool) -> set[BlockKey]:
    """Blocks whose rows are to be written or removed: whoever takes them writes them."""
    with state.lock:
        if everything:
            state.index_changed.update(record.key for record in state.tree)
        changed, state.index_changed = state.index_changed, set()
        return changed


def note_changes(state: StoreState, keys: Iterable[BlockKey]) -> None:
    """They are to be written with the next ones."""
    with state.lock:
        state.index_changed.update(keys)


def each_copy(
    state: StoreState, keys: Sequence[BlockKey], row: Callable[[BlockRecord, Level], T]
) -> list[T]:
    """`row` of every copy of these blocks; it is called with the lock held."""
    with state.lock:
        return [
            row(record, state.levels[index])
            for key in keys
            if (record := state.tree.get(key)) is not None
            for index in record.levels
        ]
