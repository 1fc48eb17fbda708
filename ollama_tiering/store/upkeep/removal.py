"""Removing whole chains: tombstones first, then what the walk took out of the books is unlinked."""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Mapping, Sequence
from types import MappingProxyType
from typing import Final

from ollama_tiering.store.block.key import BlockKey
from ollama_tiering.store.books import graves
from ollama_tiering.store.books.chain_walk import IN_USE, ChainWalk
from ollama_tiering.store.books.graves import Block
from ollama_tiering.store.books.state import Doomed, StoreState
from ollama_tiering.store.books.tree import BlockRecord
from ollama_tiering.store.upkeep import unlinking
from ollama_tiering.store.upkeep.graveyard import Graveyard
from ollama_tiering.store.values import Removal

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
    walk = ChainWalk(state, graveyard.graves, unseen, dry_run=dry_run, own_only=own_only)
    buried: dict[Block, float] = {}
    deadline = time.monotonic() + wait_seconds
    while True:
        for end in ends:
            walk.up(end)
        doomed, to_bury = walk.taken()
        buried |= to_bury
        if not dry_run and (doomed or to_bury):
            _unlink(state, graveyard, doomed, to_bury)
        kept = walk.kept(ends)
        if not kept.get(IN_USE) or dry_run or time.monotonic() >= deadline:
            break
        time.sleep(_ASK_AGAIN_SECONDS)
    result = Removal(
        chains=sum(end.key in walk.gone for end in ends),
        blocks=len(walk.gone),
        stored_bytes=walk.stored_bytes,
        kept=kept,
    )
    if not dry_run:
        clean(walk.gone | walk.missing)
    while _count_waiting(state, graveyard, buried, result, dry_run=dry_run) and (
        time.monotonic() < deadline
    ):
        time.sleep(_ASK_AGAIN_SECONDS)
    return result


def _unlink(
    state: StoreState, graveyard: Graveyard, doomed: Sequence[Doomed], to_bury: dict[Block, float]
) -> None:
    """Removes the files of what was taken out of the books, tombstones first."""
    graveyard.bury(to_bury)
    failed = unlinking.unlink(state, doomed)
    graves.lift_removed(state, graveyard.graves, [one for one in doomed if one not in failed])
    graveyard.flush(now=True)


def _count_waiting(
    state: StoreState,
    graveyard: Graveyard,
    buried: dict[Block, float],
    result: Removal,
    *,
    dry_run: bool,
) -> bool:
    """Says what stays on the remote tier, and until when. True: it is being removed now."""
    away, left = graves.waiting(state, graveyard.graves, buried)
    if dry_run:
        left = len(buried)
    result.waiting_blocks = left if away or not dry_run else 0
    result.waiting_for = _waiting_for(graveyard, away) if result.waiting_blocks else ""
    return bool(left) and not away and not dry_run


def _waiting_for(graveyard: Graveyard, away: str) -> str:
    """A sentence's end for a person."""
    said = away or "it is being emptied"
    if not graveyard.recorded:
        said += "; this could not be written down, a restart forgets it"
    elif not graveyard.survives_reboot:
        said += "; this is written down in RAM only, a reboot forgets it"
    return said
