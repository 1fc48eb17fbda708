"""Making room: victims out of the books, then unlinked. Used by every writer.

Room is what the budget, the free-space floor and the disk all grant. The budget may be lowered at
any time: what is stored or reserved by then stays, and `shrink` evicts down to it.
"""

from __future__ import annotations

import contextlib
import errno
import logging
from collections.abc import Iterator, Sequence

from ollama_tiering.store.block.description import namespace_text
from ollama_tiering.store.block.key import BlockKey, NamespaceId
from ollama_tiering.store.block.segments import ALIGNMENT, align
from ollama_tiering.store.books import model_budget, reserving, weather
from ollama_tiering.store.books.lru import Reservation
from ollama_tiering.store.books.state import Level, StoreState
from ollama_tiering.store.tiers.contract import TempBlock
from ollama_tiering.store.upkeep import unlinking
from ollama_tiering.store.upkeep.unusable import purge_quarantine

log = logging.getLogger(__name__)

_ROUNDS = 8  # what was freed may be counted as used elsewhere: directories that grew, the index


def reserve(
    state: StoreState, level: Level, file_bytes: int, namespace: NamespaceId | None = None
) -> Reservation[BlockKey] | None:
    """Reserves bytes of the level's budget, and for a namespace's block of its model's, evicting
    what must go: for the model's budget only the model's own. None: nothing more may go.

    It covers what the block adds to directories too.
    """
    need_bytes = file_bytes + level.tier.growth_bytes
    if need_bytes > level.lru.budget_bytes or not level.surveyed:
        return None
    with level.making_room:
        for _ in range(_ROUNDS):
            doomed = model_budget.victims_for(state, level, namespace, file_bytes)
            if doomed is None:
                if not keeps_floor(state, level, need_bytes):
                    return None
                found = reserving.reserve_or_victims(state, level, need_bytes)
                if isinstance(found, Reservation):
                    if level.space is not None:  # which may wait for the disk
                        level.space.take(need_bytes)
                    model_budget.count(state, level, namespace, found, file_bytes)
                    return found
                if (
                    not found
                    and level.shared is None
                    and purge_quarantine(state, level, keep_blocks=0)
                ):
                    continue
                doomed = found
            if not doomed:
                return None
            unlinking.unlink(state, doomed)
    return None


@contextlib.contextmanager
def room_for_list(state: StoreState, level: Level, file_bytes: int) -> Iterator[bool]:
    """While one of the store's own small files is replaced, which counts against the budget, too.
    Gives whether there was room; afterwards what the tier's own files take is measured anew.
    """
    reservation = reserve(state, level, align(file_bytes)) if file_bytes else None
    try:
        yield reservation is not None
    finally:
        with contextlib.suppress(OSError):
            level.tier.measure_overhead()
        reserving.release(state, reservation, level)


def keeps_floor(state: StoreState, level: Level, need_bytes: int) -> bool:
    """Whether so much may be written before the disk is too full.

    A disk at its floor takes new blocks for old ones. One that others have filled beyond it takes
    none, and nothing is evicted for them: `give_back` returns what is ours, at its own pace.
    """
    space = level.space
    if space is None:
        return True
    headroom = space.headroom_bytes()
    if headroom is not None and headroom < need_bytes:
        headroom = space.headroom_bytes(fresh=True)
    if headroom is not None and 0 <= headroom < need_bytes:
        free_bytes(state, level, need_bytes - headroom)
        headroom = space.headroom_bytes(fresh=True)
    if headroom is not None and headroom >= need_bytes:
        return True
    weather.disk_full(state, level)
    return False


def give_back(state: StoreState, level: Level) -> bool:
    """Evicts what brings the disk back to its floor, and no more."""
    if level.space is None:
        return False
    headroom = level.space.headroom_bytes(fresh=True)
    if headroom is None or headroom >= 0:
        return False
    doomed = reserving.victims(state, level, -headroom, partial=True)
    unlinking.unlink(state, doomed)
    return bool(doomed)


def shrink(state: StoreState, level: Level) -> bool:
    """Evicts down to the budget, as far as leases allow; to be called again when they end."""
    if level.shared is not None or not level.lru.excess_bytes:
        return False  # a shared tier's own thread trims it
    doomed, short = reserving.excess(state, level)
    bad_bytes = level.tier.quarantined_bytes() if short else 0
    unlinking.unlink(state, doomed)
    return bool(bad_bytes and purge_quarantine(state, level, keep_blocks=0)) or bool(doomed)


def shrink_models(state: StoreState, level: Level) -> bool:
    """The same down to the budgets of models, as far as pins allow, too."""
    evicted = False
    for namespace in state.terms.with_budget:
        if level.held_bytes.get(namespace):
            doomed = model_budget.excess_of(state, level, namespace)
            unlinking.unlink(state, doomed)
            evicted = evicted or bool(doomed)
    return evicted


def free_bytes(state: StoreState, level: Level, need_bytes: int) -> bool:
    """Evicts that much within the budget: the disk is fuller than the budget knows."""
    doomed = reserving.victims(state, level, need_bytes)
    unlinking.unlink(state, doomed)
    return bool(doomed)


def create_temp(
    state: StoreState,
    level: Level,
    namespace: NamespaceId,
    key: BlockKey,
    file_bytes: int,
    reservation: Reservation[BlockKey],
) -> TempBlock:
    """A file for the block; on ENOSPC evicts, retries once, then lets the error pass.

    What directories grew by is counted with them from now on, and no more in the reservation.
    """
    try:
        temp = level.tier.create(namespace, key, file_bytes)
    except OSError as error:
        if error.errno not in (errno.ENOSPC, errno.EDQUOT):
            raise
        if not free_bytes(state, level, file_bytes):
            raise
        temp = level.tier.create(namespace, key, file_bytes)
    reserving.grown(state, level, reservation, temp.grown_bytes)
    return temp


def describe(
    state: StoreState, level: Level, namespace: NamespaceId, fields: Sequence[tuple[str, str]]
) -> None:
    """Leaves the namespace's description beside its blocks; nothing is evicted for it."""
    need_bytes = level.tier.growth_bytes
    if level.tier.directory is not None:  # the file, and what its directory may grow by
        need_bytes += align(len(namespace_text(fields))) + ALIGNMENT
    reservation = reserving.reserve(state, level, need_bytes)
    if reservation is None:
        return
    try:
        if level.surveyed:
            level.tier.describe(namespace, fields)
    except OSError as error:
        log.warning("describe failed: tier=%s error=%s", level.tier.kind.label, error)
    reserving.release(state, reservation, level)
