"""Time to live: what nobody used for so long is dropped, children before their parents.

Age is the wall clock's, which may jump. A jump seen while running, and the first minutes after a
start (a machine whose clock is not set yet), put expiry off: a wrong clock must not empty a store.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Final

from ollama_tiering.store import room
from ollama_tiering.store.eviction import Rules
from ollama_tiering.store.key import BlockKey
from ollama_tiering.store.state import Level, StoreState

log = logging.getLogger(__name__)

START_SECONDS: Final = 600.0  # after a start
JUMP_SECONDS: Final = 3600.0  # after a jump of the wall clock (or a suspended machine)
_EVERY_SECONDS: Final = 60.0
_JUMP: Final = 120.0
_MOST_BLOCKS: Final = 1000  # of one pass
_YOUNG_BLOCKS: Final = 64  # in a row; what follows is younger still, but for small disorder


class Expiry:
    """Not thread-safe: the mover drives it."""

    def __init__(
        self, ttl_seconds: float, clock: Callable[[], float], wall_clock: Callable[[], float]
    ) -> None:
        self._ttl_seconds = ttl_seconds
        self._clock = clock
        self._wall_clock = wall_clock
        self._offset = wall_clock() - clock()
        self._next = clock() + START_SECONDS

    def run(self, state: StoreState) -> bool:
        """Drops some of what is too old; whether there was any."""
        if not self._ttl_seconds or self._jumped() or self._clock() < self._next:
            return False
        before = self._wall_clock() - self._ttl_seconds
        own = [level for level in state.levels if level.shared is None]  # not what others need
        dropped = [self._drop(state, level, before) for level in own]
        if not any(dropped):
            self._next = self._clock() + _EVERY_SECONDS
        return any(dropped)

    def _jumped(self) -> bool:
        offset = self._wall_clock() - self._clock()
        jump, self._offset = offset - self._offset, offset
        if abs(jump) > _JUMP:
            log.warning("the clock jumped, nothing expires for now: seconds=%.0f", jump)
            self._next = self._clock() + JUMP_SECONDS
        return abs(jump) > _JUMP

    def _drop(self, state: StoreState, level: Level, before: float) -> int:
        with state.lock:
            state.expire()
            rules = Rules(state, level, partial=False)
            chosen: dict[BlockKey, None] = {}
            for segment in level.lru.segments():
                young = 0
                for key in segment:
                    taken = len(chosen)
                    self._choose(state, level, key, before, rules, chosen)
                    young = 0 if len(chosen) > taken else young + 1
                    if young >= _YOUNG_BLOCKS or len(chosen) >= _MOST_BLOCKS:
                        break
            doomed = state.take(level, chosen)
            level.stats.expired_blocks += len(doomed)
        room.unlink(state, doomed)
        return len(doomed)

    def _choose(
        self,
        state: StoreState,
        level: Level,
        key: BlockKey,
        before: float,
        rules: Rules,
        chosen: dict[BlockKey, None],
    ) -> None:
        """The block and, one by one, the parents that may go with it."""
        candidate: BlockKey | None = key
        while candidate is not None and candidate in level.lru:
            record = state.tree.get(candidate)
            if (
                record is None
                or record.last_use >= before
                or candidate in chosen
                or level.lru.pinned(candidate)
                or not rules.may_evict(candidate)
            ):
                return
            chosen[candidate] = None
            candidate = rules.unblocks(candidate)
