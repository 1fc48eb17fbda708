"""When blocks of a shared tier were last used, by any sidecar. Takes the lock."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from ollama_tiering.store.block.key import BlockKey
from ollama_tiering.store.books.state import StoreState
from ollama_tiering.store.books.tree import BlockRecord


@dataclass(slots=True)
class Uses:
    """What comparing our uses with the files' times has shown."""

    parents: dict[BlockKey, bytes] = field(default_factory=dict)  # of the blocks that are stored
    ours: list[BlockRecord] = field(default_factory=list)  # used later than the files say
    changed: bool = False  # some were used later by others


def compare(
    state: StoreState,
    keys: Sequence[BlockKey],
    used: Mapping[BlockKey, float],
    uses: Uses,
    lag_seconds: float,
) -> None:
    """Others' later uses (Unix seconds) come into the books; ours that are later by more than the
    lag are noted.
    """
    with state.lock:
        for key in keys:
            record = state.tree.get(key)
            if record is None:
                continue
            uses.parents[key] = record.parent
            if used[key] > record.last_use:
                record.last_use = used[key]
                uses.changed = True
            elif record.last_use > used[key] + lag_seconds:
                uses.ours.append(record)
