"""Which copies may leave a tier, and in which order. The store holds the lock; nothing is changed.

The order is the tier's own (lru.py). May a copy go? All of it is here:

- it is not held (leased, read or being moved), and no person's pin keeps it;
- it does not wait to be written down, nor should first, unless that cannot happen now;
- no copy of a child is just being unlinked by another thread: were the parent unlinked first and
  the process killed, the child would be left behind;
- no block is left whose parent lies only in a faster tier than itself: the tiers from any one down
  hold whole chains, so that losing what is above (RAM at a reboot) leaves no hole either. A parent
  goes in the same pass as the last of its children.
"""

from __future__ import annotations

from collections.abc import Container
from typing import TYPE_CHECKING

from ollama_tiering.store.block.key import BlockKey
from ollama_tiering.store.books.tree import BlockRecord

if TYPE_CHECKING:
    from ollama_tiering.store.books.state import Level, StoreState


def choose_victims(
    state: StoreState, level: Level, need_bytes: int, *, partial: bool
) -> list[BlockKey]:
    rules = Rules(state, level, partial=partial)
    victims = level.lru.victims(need_bytes, rules.may_evict, rules.unblocks, partial=partial)
    if not victims and not partial and rules.waits_for_shared:
        # A shared tier may not take anything for minutes: what is new is worth more then.
        rules = Rules(state, level, partial=partial, waiting=False)
        victims = level.lru.victims(need_bytes, rules.may_evict, rules.unblocks)
    return victims


def blocking_leaf(
    state: StoreState, level: Level, among: Container[bytes] | None = None
) -> BlockKey | None:
    """The least valuable block of another tier that keeps one of this tier from leaving: an end of
    a chain whose start lies here and whose rest does not.

    `among`: only blocks of these namespaces.

    What waits to be written down leaves by that, if the tier below takes anything now. A shared
    tier's blocks are not ours to drop, and those of a tier that fails now are not dropped for that.
    """
    below = state.below(level)
    waiting = state.unsaved if below is not None and state.waits_for(below) else ()
    if all(key in waiting or state.held(key) for key in level.lru):
        return None
    for other in state.levels:
        if other is level or other.shared is not None or state.suspended(other):
            continue
        for key in other.lru:
            record = state.tree.get(key)
            if record is None or level.index in record.levels or state.tree.children(key):
                continue
            if among is not None and record.namespace not in among:
                continue
            if other is not state.levels[max(record.levels)]:
                continue
            if key in state.leaving_children or state.held(key) or state.pins.keeps(key):
                continue
            for before in state.tree.ancestors(record.parent):
                if level.index in before.levels:
                    if not (state.held(before.key) or before.key in waiting):
                        return key
                    break
    return None


class Rules:
    """Rules of one pass over one level; what it let go counts as gone."""

    def __init__(
        self, state: StoreState, level: Level, *, partial: bool, waiting: bool = True
    ) -> None:
        self._state, self._level = state, level
        self._tree = state.tree
        self._leaving_children = state.leaving_children
        self._index = level.index
        below = state.below(level)
        waits = waiting and below is not None and state.waits_for(below)
        self.waits_for_shared = waits and below is not None and below.shared is not None
        # What a shared tier below has no copy of yet waits too, unless room is needed now.
        self._only_copied = self.waits_for_shared and partial
        self._waiting = state.unsaved if waits else ()
        self._admission = state.admission if waits else None
        self._gone: set[BlockKey] = set()
        self._gone_children: dict[bytes, int] = {}

    def may_evict(self, key: BlockKey) -> bool:
        record = self._tree.get(key)
        if record is None:
            return True
        if (
            key in self._leaving_children
            or key in self._waiting
            or self._state.kept_by_pin(self._level, key)
        ):
            return False
        if self._admission is not None and self._admission.holds(record):
            return False
        left = self._deepest(record, without_this=True)
        if left > self._index:  # a copy below this one carries the chain
            return True
        if self._only_copied:
            return False
        children = self._tree.children(key)
        if left < 0 and len(children) > self._gone_children.get(key, 0):
            return False
        return all(
            self._deepest(child, without_this=child.key in self._gone) <= left for child in children
        )

    def unblocks(self, key: BlockKey) -> BlockKey | None:
        """The block whose turn may have come now that this one goes."""
        record = self._tree.get(key)
        if record is None:
            return None
        self._gone.add(key)
        self._gone_children[record.parent] = self._gone_children.get(record.parent, 0) + 1
        return BlockKey(record.parent)

    def _deepest(self, record: BlockRecord, *, without_this: bool) -> int:
        levels = record.levels
        if without_this:
            return max((index for index in levels if index != self._index), default=-1)
        return max(levels, default=-1)
