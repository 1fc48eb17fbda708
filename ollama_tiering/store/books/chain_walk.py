"""Taking whole chains out of the books: from their ends, up to what is pinned, in use or needed by
another chain. A dry run walks the same way and only counts.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Final

from ollama_tiering.store.block.key import BlockKey, NamespaceId
from ollama_tiering.store.books.graves import Block, Graves
from ollama_tiering.store.books.state import Doomed, StoreState
from ollama_tiering.store.books.tree import BlockRecord

NEEDED: Final = "needed by another chain"
PINNED: Final = "pinned"
IN_USE: Final = "in use"
ELSEWHERE: Final = "in the shared directory"
TOO_MANY: Final = "no more can wait for the remote tier"

_BLOCKS_PER_HOLD: Final = 256  # of the lock: lookups must not wait for longer


class ChainWalk:
    """`up` and `kept` take the lock. With `own_only` the remote tier is left alone."""

    def __init__(
        self,
        state: StoreState,
        graves: Graves,
        unseen: Mapping[Block, float],
        *,
        dry_run: bool,
        own_only: bool,
    ) -> None:
        self._state = state
        self._graves = graves
        self._own_only = own_only
        self._doomed: list[Doomed] = []
        self._to_bury = dict(unseen)  # when those were made that may lie on the remote tier
        self._dry_run = dry_run
        self._gone_children: dict[bytes, int] = {}  # of a dry run
        self._stops: dict[BlockKey, BlockKey] = {}  # end of a chain -> block where its walk stopped
        self.gone: set[BlockKey] = set()
        self.missing: set[BlockKey] = set()  # that came before them, and are not stored
        self.stored_bytes = 0  # of those that are gone

    def up(self, end: BlockRecord) -> None:
        """Removes from the end of the chain, or from where the walk before this one stopped."""
        at: BlockKey | None = self._stops.pop(end.key, end.key)
        while at is not None:
            with self._state.lock:
                self._state.expire()
                at = self._some(end, at)

    def taken(self) -> tuple[list[Doomed], dict[Block, float]]:
        """What is to be unlinked, and what is to be buried before that, since it was last asked."""
        doomed, self._doomed = self._doomed, []
        to_bury, self._to_bury = self._to_bury, {}
        return doomed, to_bury

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

    def _some(self, end: BlockRecord, at: BlockKey) -> BlockKey | None:
        """Takes out a few blocks; where to go on, None when this chain is done."""
        state = self._state
        for _ in range(_BLOCKS_PER_HOLD):
            record = state.tree.get(at)
            if record is None:
                self.missing.add(at)
                return None  # the chain's start, or evicted meanwhile
            if at not in self.gone:
                if self._reason(record):
                    self._stops[end.key] = at
                    return None
                self._take(record)
            at = BlockKey(record.parent)
        return at

    def _take(self, record: BlockRecord) -> None:
        """Takes a block out of the books, after the window blocks that hang on it."""
        state = self._state
        for window in state.tree.windows(record.key):
            if window.key not in self.gone:
                self._take(window)
        if self._buries(record):
            self._to_bury[record.namespace, record.key] = record.created
        levels = [state.levels[index] for index in sorted(record.levels)]
        self.gone.add(record.key)
        self.stored_bytes += sum(level.lru.stored_bytes(record.key) for level in levels)
        if self._dry_run and not record.window:
            self._gone_children[record.parent] = self._gone_children.get(record.parent, 0) + 1
        elif not self._dry_run:
            self._doomed += [d for level in levels if (d := state.drop_copy(level, record.key))]

    def _reason(self, record: BlockRecord) -> str:
        """Why this block must stay; empty when it may go."""
        state = self._state
        if state.pins.keeps(record.key):
            return PINNED
        if self._own_only and any(state.levels[at].tier.is_shared for at in record.levels):
            return ELSEWHERE
        if state.tree.child_count(record.key) > self._gone_children.get(record.key, 0):
            return NEEDED
        if self._buries(record) and self._graves.full(len(self._to_bury)):
            return TOO_MANY
        used = any(state.held(one.key) for one in (record, *state.tree.windows(record.key)))
        return IN_USE if used else ""

    def _buries(self, record: BlockRecord) -> bool:
        return not self._own_only and self._graves.needed(record)


@dataclass(slots=True)
class TakenEnd:
    """The end of a chain that is out of the books."""

    doomed: list[Doomed] = field(default_factory=list)
    to_bury: dict[Block, float] = field(default_factory=dict)  # with when they were made
    blocks: int = 0
    in_use: bool = False  # a block that somebody uses ended it


def take_end(
    state: StoreState, graves: Graves, namespace: NamespaceId, keys: Sequence[BlockKey]
) -> TakenEnd:
    """Removes from the last of `keys` up to what another sequence needs. Takes the lock."""
    end = TakenEnd()
    with state.lock:
        state.expire()
        for key in reversed(keys):
            record = state.tree.get(key)
            if record is None or record.namespace != namespace:
                continue
            kept = state.pins.keeps(key)  # a person's: not worth waiting for
            windows = state.tree.windows(key)
            end.in_use = not kept and any(state.held(one.key) for one in (record, *windows))
            if state.tree.child_count(key) or kept or end.in_use:
                break
            for one in (*windows, record):
                if graves.needed(one) and not graves.full(len(end.to_bury)):
                    end.to_bury[namespace, one.key] = one.created
                levels = [state.levels[index] for index in sorted(one.levels)]
                end.doomed += [d for level in levels if (d := state.drop_copy(level, one.key))]
                end.blocks += 1
    return end
