"""Making room: takes victims under the lock, unlinks them outside of it. Used by every writer."""

from __future__ import annotations

import contextlib
import errno
import logging
from collections.abc import Sequence

from ollama_tiering.store.key import BlockKey, NamespaceId
from ollama_tiering.store.lru import Reservation
from ollama_tiering.store.state import Doomed, Level, StoreState
from ollama_tiering.store.tier import TempBlock

log = logging.getLogger(__name__)

_KEEP_BAD_BLOCKS = 16
_ROUNDS = 4  # others may take what was freed; then there is no room for this one


def reserve_room(state: StoreState, level: Level, need_bytes: int) -> Reservation[BlockKey] | None:
    """A claim on the level's budget, evicting what must go. None: nothing more may be evicted."""
    if need_bytes > level.lru.budget_bytes:
        return None
    for _ in range(_ROUNDS):
        with state.lock:
            if level.shared is not None:  # evicting gives nothing back before the next scan
                return level.shared.reserve(
                    level.lru, need_bytes, state.clock(), state.wall_clock()
                )
            claim = level.lru.reserve(need_bytes)
            if claim is not None:
                return claim
            doomed = state.take_victims(level, level.lru.shortfall_bytes(need_bytes))
        if doomed:
            unlink(state, doomed)
        elif not purge_quarantine(state, level, keep_blocks=0):
            return None
    return None


def free_bytes(state: StoreState, level: Level, need_bytes: int) -> bool:
    """Evicts that much within the budget: the disk is fuller than the budget knows."""
    with state.lock:
        doomed = state.take_victims(level, need_bytes)
    unlink(state, doomed)
    return bool(doomed)


def create_temp(
    state: StoreState, level: Level, namespace: NamespaceId, key: BlockKey, file_bytes: int
) -> TempBlock:
    """A file for the block; on ENOSPC evicts, retries once, then lets the error pass."""
    try:
        return level.tier.create(namespace, key, file_bytes)
    except OSError as error:
        if error.errno not in (errno.ENOSPC, errno.EDQUOT):
            raise
        if not free_bytes(state, level, file_bytes):
            raise
        return level.tier.create(namespace, key, file_bytes)


def unlink(state: StoreState, doomed: Sequence[Doomed]) -> None:
    for one in doomed:
        if one.level.shared is not None:  # its own thread does it: this one may not wait
            with state.lock:
                one.level.shared.doomed[one.namespace, one.key] = None
                state.gone(one, unlinked=True)
            continue
        unlinked = True
        try:
            one.level.tier.remove(one.namespace, one.key)
        except OSError as error:
            unlinked = False
            log.warning("unlink failed: key=%s error=%s", one.key.hex(), error)
        with state.lock:
            state.gone(one, unlinked=unlinked)


def discard(level: Level, temp: TempBlock) -> None:
    with contextlib.suppress(OSError):
        level.tier.discard(temp)


def quarantine(state: StoreState, level: Level, namespace: NamespaceId, key: BlockKey) -> bool:
    """Renames a damaged copy out of the way and forgets it. False when it is not there."""
    try:
        level.tier.quarantine(namespace, key)
    except FileNotFoundError:
        with state.lock:
            state.forget_copy(level, key)
        return False
    except OSError as error:
        if level.shared is None:
            raise
        # Not to be trusted, though it cannot be put out of the way now: every copy is verified.
        log.warning("quarantine failed: key=%s error=%s", key.hex(), error)
        with state.lock:
            state.forget_copy(level, key)
        return False
    with state.lock:
        level.stats.quarantined_blocks += 1
        state.counters.miss("corrupt")
        state.forget_copy(level, key)
        state.count_overhead(level)
    purge_quarantine(state, level, keep_blocks=_KEEP_BAD_BLOCKS)
    return True


def set_aside(state: StoreState, level: Level, key: BlockKey) -> None:
    """Forgets a copy this reader does not understand; its file stays and its bytes count."""
    with state.lock:
        doomed = state.drop_copy(level, key)
        if doomed:
            state.counters.miss("unknown format")
            state.gone(doomed, unlinked=False)


def purge_quarantine(state: StoreState, level: Level, *, keep_blocks: int) -> bool:
    """Keeps only the newest damaged blocks; their bytes count against the budget."""
    before = level.tier.quarantined_bytes()
    try:
        level.tier.purge_quarantine(keep_blocks)
    except OSError as error:
        log.warning("purge failed: tier=%s error=%s", level.tier.kind.label, error)
    with state.lock:
        state.count_overhead(level)
    return level.tier.quarantined_bytes() < before
