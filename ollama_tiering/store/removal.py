"""Removing whole chains: from their ends, up to what is pinned, in use or needed by another chain.

A dry run walks the same way and only counts.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Final

from ollama_tiering.store import room
from ollama_tiering.store.inventory import Removal
from ollama_tiering.store.key import BlockKey
from ollama_tiering.store.state import Doomed, StoreState
from ollama_tiering.store.tree import BlockRecord

SHARED: Final = "needed by another chain"
PINNED: Final = "pinned"
IN_USE: Final = "in use"

_BLOCKS_PER_HOLD: Final = 256  # of the lock: lookups must not wait for longer
_ASK_AGAIN_SECONDS: Final = 0.02


def remove_chains(
    state: StoreState, ends: Sequence[BlockRecord], *, dry_run: bool, wait_seconds: float = 0.0
) -> Removal:
    """`ends` are last blocks of chains. Waits so long for blocks that are only in use briefly."""
    walk = _Walk(state, dry_run=dry_run)
    deadline = time.monotonic() + wait_seconds
    while True:
        for end in ends:
            walk.up(end)
        kept = walk.kept(ends)
        if not kept.get(IN_USE) or dry_run or time.monotonic() >= deadline:
            break
        time.sleep(_ASK_AGAIN_SECONDS)
    walk.result.kept = kept
    walk.result.chains = sum(end.key in walk.gone for end in ends)
    return walk.result


class _Walk:
    def __init__(self, state: StoreState, *, dry_run: bool) -> None:
        self._state = state
        self._dry_run = dry_run
        self._gone_children: dict[bytes, int] = {}  # of a dry run
        self._stops: dict[BlockKey, BlockKey] = {}  # end of a chain -> block where its walk stopped
        self.gone: set[BlockKey] = set()
        self.result = Removal()

    def up(self, end: BlockRecord) -> None:
        """Removes from the end of the chain, or from where the walk before this one stopped."""
        at: BlockKey | None = self._stops.pop(end.key, end.key)
        while at is not None:
            doomed: list[Doomed] = []
            with self._state.lock:
                self._state.expire()
                at = self._some(end, at, doomed)
            room.unlink(self._state, doomed)

    def kept(self, ends: Sequence[BlockRecord]) -> dict[str, int]:
        """Blocks of these chains that remain, by what stopped the removal below them."""
        seen: set[BlockKey] = set()
        kept: dict[str, int] = {}
        with self._state.lock:
            for stop in map(self._stops.get, (end.key for end in ends)):
                if stop is None or stop in self.gone:
                    continue
                reason = ""
                for record in self._state.tree.ancestors(stop):
                    if record.key in seen:
                        break
                    reason = reason or self._reason(record) or IN_USE
                    kept[reason] = kept.get(reason, 0) + 1
                    seen.add(record.key)
        return kept

    def _some(self, end: BlockRecord, at: BlockKey, doomed: list[Doomed]) -> BlockKey | None:
        """Takes out a few blocks; where to go on, None when this chain is done. Lock held."""
        state = self._state
        for _ in range(_BLOCKS_PER_HOLD):
            record = state.tree.get(at)
            if record is None:
                return None  # the chain's start, or evicted meanwhile
            if at not in self.gone:
                if self._reason(record):
                    self._stops[end.key] = at
                    return None
                self._take(record, doomed)
            at = BlockKey(record.parent)
        return at

    def _take(self, record: BlockRecord, doomed: list[Doomed]) -> None:
        state = self._state
        levels = [state.levels[index] for index in sorted(record.levels)]
        self.gone.add(record.key)
        self.result.blocks += 1
        self.result.stored_bytes += sum(level.lru.stored_bytes(record.key) for level in levels)
        if self._dry_run:
            self._gone_children[record.parent] = self._gone_children.get(record.parent, 0) + 1
        else:
            doomed += [d for level in levels if (d := state.drop_copy(level, record.key))]

    def _reason(self, record: BlockRecord) -> str:
        """Why this block must stay; empty when it may go. Lock held."""
        state = self._state
        if state.pins.keeps(record.key):
            return PINNED
        if state.tree.child_count(record.key) > self._gone_children.get(record.key, 0):
            return SHARED
        return IN_USE if state.pinned(record.key) else ""
