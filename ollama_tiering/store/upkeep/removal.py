"""Removing whole chains: from their ends, up to what is pinned, in use or needed by another chain.

A dry run walks the same way and only counts.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Mapping, Sequence
from types import MappingProxyType
from typing import Final

from ollama_tiering.store.block.key import BlockKey
from ollama_tiering.store.books.state import Doomed, StoreState
from ollama_tiering.store.books.tree import BlockRecord
from ollama_tiering.store.tiers.contract import TierKind
from ollama_tiering.store.upkeep import room
from ollama_tiering.store.upkeep.graveyard import Block, Graveyard
from ollama_tiering.store.values import Removal

SHARED: Final = "needed by another chain"
PINNED: Final = "pinned"
IN_USE: Final = "in use"
_REMOTE: Final = TierKind.REMOTE
ELSEWHERE: Final = "in the shared directory"
TOO_MANY: Final = "no more can wait for the remote tier"

_BLOCKS_PER_HOLD: Final = 256  # of the lock: lookups must not wait for longer
_ASK_AGAIN_SECONDS: Final = 0.02


def remove_chains(
    state: StoreState,
    ends: Sequence[BlockRecord],
    graveyard: Graveyard,
    *,
    dry_run: bool,
    own_only: bool = False,
    wait_seconds: float = 0.0,
    unseen: Mapping[Block, float] = MappingProxyType({}),
    clean: Callable[[Collection[BlockKey]], None] = lambda keys: None,
) -> Removal:
    """`ends` are last blocks of chains. With `own_only` the remote tier is left alone: what lies
    there stays, and so does what comes before it. Waits so long for blocks that are only in use
    briefly, and for the remote tier's thread to remove its copies. `unseen` are blocks to be
    removed there that are not in the books. `clean` is told which blocks are gone.
    """
    walk = Walk(state, graveyard, unseen, dry_run=dry_run, own_only=own_only)
    deadline = time.monotonic() + wait_seconds
    while True:
        for end in ends:
            walk.up(end)
        walk.unlink()
        kept = walk.kept(ends)
        if not kept.get(IN_USE) or dry_run or time.monotonic() >= deadline:
            break
        time.sleep(_ASK_AGAIN_SECONDS)
    walk.result.kept = kept
    walk.result.chains = sum(end.key in walk.gone for end in ends)
    if not dry_run:
        clean(walk.gone | walk.missing)
    while walk.count_waiting() and time.monotonic() < deadline:
        time.sleep(_ASK_AGAIN_SECONDS)
    return walk.result


class Walk:
    def __init__(
        self,
        state: StoreState,
        graveyard: Graveyard,
        unseen: Mapping[Block, float],
        *,
        dry_run: bool,
        own_only: bool,
    ) -> None:
        self._state = state
        self._graveyard = graveyard
        self._own_only = own_only
        self._doomed: list[Doomed] = []
        self._to_bury = dict(unseen)  # when those were made that may lie on the remote tier
        self._buried: dict[Block, float] = {}
        self._dry_run = dry_run
        self._gone_children: dict[bytes, int] = {}  # of a dry run
        self._stops: dict[BlockKey, BlockKey] = {}  # end of a chain -> block where its walk stopped
        self.gone: set[BlockKey] = set()
        self.missing: set[BlockKey] = set()  # that came before them, and are not stored
        self.result = Removal()

    def up(self, end: BlockRecord) -> None:
        """Removes from the end of the chain, or from where the walk before this one stopped."""
        at: BlockKey | None = self._stops.pop(end.key, end.key)
        while at is not None:
            with self._state.lock:
                self._state.expire()
                at = self._some(end, at)

    def unlink(self) -> None:
        """Removes the files of what was taken out of the books, tombstones first."""
        doomed, self._doomed = self._doomed, []
        to_bury, self._to_bury = self._to_bury, {}
        self._buried |= to_bury
        if self._dry_run or not (doomed or to_bury):
            return
        self._graveyard.bury(to_bury)
        failed = room.unlink(self._state, doomed)
        with self._state.lock:
            for one in doomed:
                # Removed just now, by a tool that does it itself.
                by_us = one.level.tier.kind is TierKind.REMOTE and one.level.shared is None
                if by_us and one not in failed:
                    self._graveyard.lift(one.namespace, one.key)
        self._graveyard.flush(now=True)

    def count_waiting(self) -> bool:
        """Says what stays on the remote tier, and until when. True: it is being removed now."""
        state, result = self._state, self.result
        with state.lock:
            away = self._graveyard.away
            left = len(self._buried) if self._dry_run else self._graveyard.left(self._buried)
            result.waiting_blocks = left if away or not self._dry_run else 0
        result.waiting_for = self._waiting_for(away) if result.waiting_blocks else ""
        return bool(left) and not away and not self._dry_run

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
        """Takes out a few blocks; where to go on, None when this chain is done. Lock held."""
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
        self.result.blocks += 1
        self.result.stored_bytes += sum(level.lru.stored_bytes(record.key) for level in levels)
        if self._dry_run and not record.window:
            self._gone_children[record.parent] = self._gone_children.get(record.parent, 0) + 1
        elif not self._dry_run:
            self._doomed += [d for level in levels if (d := state.drop_copy(level, record.key))]

    def _reason(self, record: BlockRecord) -> str:
        """Why this block must stay; empty when it may go. Lock held."""
        state = self._state
        if state.pins.keeps(record.key):
            return PINNED
        if self._own_only and any(state.levels[at].tier.kind is _REMOTE for at in record.levels):
            return ELSEWHERE
        if state.tree.child_count(record.key) > self._gone_children.get(record.key, 0):
            return SHARED
        if self._buries(record) and self._graveyard.full(len(self._to_bury)):
            return TOO_MANY
        used = any(state.pinned(one.key) for one in (record, *state.tree.windows(record.key)))
        return IN_USE if used else ""

    def _buries(self, record: BlockRecord) -> bool:
        return not self._own_only and self._graveyard.needed(record)

    def _waiting_for(self, away: str) -> str:
        """A sentence's end for a person."""
        said = away or "it is being emptied"
        if not self._graveyard.recorded:
            said += "; this could not be written down, a restart forgets it"
        elif not self._graveyard.survives_reboot:
            said += "; this is written down in RAM only, a reboot forgets it"
        return said
