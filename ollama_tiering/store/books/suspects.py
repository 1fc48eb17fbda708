"""Blocks that may be gone or damaged as one before them is: they are looked at before a writer is
told that they are stored. Each verb takes the lock.

Where one file of a chain was lost, mostly all were: a folder was emptied, a disk ran full or broke.
Looking only at the one that a prompt came upon would find one hole for each prompt.
"""

from __future__ import annotations

from collections import OrderedDict, deque
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Final, NamedTuple

from ollama_tiering.store.block.key import BlockKey
from ollama_tiering.store.books.tree import TOP_ONLY, BlockRecord

if TYPE_CHECKING:
    from ollama_tiering.store.books.state import StoreState

MOST: Final = 1 << 14  # that wait; what is below them is found by a later prompt
_CHILDREN_PER_HOLD: Final = 512  # of the lock: look-ups must not wait for longer


@dataclass(slots=True)
class Suspects:
    """Data; the store holds the lock. Each key with whether all of its bytes are to be read."""

    lost: deque[tuple[BlockKey, bool]] = field(default_factory=deque)  # children not noted yet
    waiting: OrderedDict[BlockKey, bool] = field(default_factory=OrderedDict)
    shared: OrderedDict[BlockKey, bool] = field(default_factory=OrderedDict)  # on a shared tier
    # No suspects, but of more than one copy only the nearest was looked at.
    others: OrderedDict[BlockKey, bool] = field(default_factory=OrderedDict)

    def __contains__(self, key: BlockKey) -> bool:
        return key in self.waiting or key in self.shared


class Suspect(NamedTuple):
    record: BlockRecord
    payload: bool


def came_upon(state: StoreState, key: BlockKey, *, damaged: bool) -> None:
    """A copy of the block was gone or damaged. Only noted here: a client may wait."""
    with state.lock:
        # What waits has its children behind it already.
        if key not in state.suspects and len(state.suspects.lost) < MOST:
            state.suspects.lost.append((key, damaged))
            state.work.set()


def expand(state: StoreState) -> bool:
    """Notes some of the blocks that come after those that were lost; whether there may be more."""
    suspects = state.suspects
    if not suspects.lost:
        return False
    with state.lock:
        left = _CHILDREN_PER_HOLD
        while suspects.lost and left > 0:
            key, payload = suspects.lost.popleft()
            children = state.tree.children(key)
            left -= 1 + len(children)
            for child in children:
                if child.key not in suspects and len(suspects.waiting) < MOST:
                    suspects.waiting[child.key] = payload
                    suspects.lost.append((child.key, payload))
        return bool(suspects.lost)


def next_own(state: StoreState) -> Suspect | None:
    """One to be looked at on this host's own tiers."""
    return _next(state, state.suspects.waiting) or _next(state, state.suspects.others)


def next_shared(state: StoreState) -> Suspect | None:
    """One to be looked at on the shared tier, by its thread."""
    return _next(state, state.suspects.shared)


def on_own_tiers(state: StoreState, key: BlockKey) -> Suspect | None:
    """What a writer offers and the books have there; None if they do not."""
    with state.lock:
        record = state.tree.get(key)
        if record is None or all(state.levels[index].shared for index in record.levels):
            return None
        return Suspect(record, state.suspects.waiting.get(key, False))


def look_later(state: StoreState, key: BlockKey) -> None:
    """A copy is there; the background looks at the others too."""
    with state.lock:
        if key not in state.suspects.waiting and len(state.suspects.others) < MOST:
            state.suspects.others[key] = False


def looked_at(state: StoreState, record: BlockRecord, *, payload: bool, lost: bool) -> None:
    """Looks at this host's own tiers: names and sizes, and with `payload` all bytes. `lost`: a copy
    is not there any more, so that one in RAM is worth the disk again.
    """
    with state.lock:
        suspects, key = state.suspects, record.key
        suspects.others.pop(key, None)
        wanted = suspects.waiting.get(key)
        there = state.tree.get(key) is record
        if wanted is not None and (payload or not wanted or not there):
            del suspects.waiting[key]
            if there and any(state.levels[index].shared for index in record.levels):
                suspects.shared[key] = wanted
        if there and lost:
            _want_again(state, record)


def looked_at_shared(state: StoreState, record: BlockRecord) -> None:
    with state.lock:
        state.suspects.shared.pop(record.key, None)
        if state.tree.get(record.key) is record:
            _want_again(state, record)


def _want_again(state: StoreState, record: BlockRecord) -> None:
    """What is in RAM only is worth the tier below."""
    if record.levels is TOP_ONLY:
        state.admission.committed(record, state.levels[0], tail=False)


def _next(state: StoreState, waiting: OrderedDict[BlockKey, bool]) -> Suspect | None:
    with state.lock:
        while waiting:
            key, payload = next(iter(waiting.items()))
            record = state.tree.get(key)
            if record is not None:
                return Suspect(record, payload)
            del waiting[key]
        return None
