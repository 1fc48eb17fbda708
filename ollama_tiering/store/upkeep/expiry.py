"""Time to live: what nobody used for so long is dropped, children before their parents.

Age is the wall clock's, which may jump. A jump seen while running, and the first minutes after a
start (a machine whose clock is not set yet), put expiry off: a wrong clock must not empty a store.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Final

from ollama_tiering.store.block.key import BlockKey
from ollama_tiering.store.books import ageing
from ollama_tiering.store.books.state import Level, StoreState
from ollama_tiering.store.upkeep import unlinking

log = logging.getLogger(__name__)

START_SECONDS: Final = 600.0  # after a start
JUMP_SECONDS: Final = 3600.0  # after a jump of the wall clock (or a suspended machine)
_EVERY_SECONDS: Final = 60.0
_JUMP: Final = 120.0
_MOST_BLOCKS: Final = 1000  # of one pass
_LOOKS_PER_HOLD: Final = 2000  # of the lock: look-ups must not wait for longer


class Expiry:
    """Is not thread-safe: the mover of the levels drives it."""

    def __init__(self, clock: Callable[[], float], wall_clock: Callable[[], float]) -> None:
        self._clock = clock
        self._wall_clock = wall_clock
        self._offset = wall_clock() - clock()
        self._next = clock() + START_SECONDS

    def run(self, state: StoreState, levels: Iterable[Level]) -> bool:
        """Drops some of what is too old; whether there was any."""
        shortest = state.terms.shortest_ttl_seconds
        if not shortest or self._jumped() or self._clock() < self._next:
            return False
        now = self._wall_clock()
        dropped = [self._drop(state, level, now, shortest) for level in levels]
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

    def _drop(self, state: StoreState, level: Level, now: float, shortest: float) -> int:
        """A model may have a longer time than `shortest`: its blocks are passed over."""
        dropped = 0
        for segment in ageing.segments(state, level):
            for keys in _parts(segment):
                doomed, young = ageing.take_too_old(state, level, keys, now, shortest)
                unlinking.unlink(state, doomed)
                dropped += len(doomed)
                if young or dropped >= _MOST_BLOCKS:
                    break
        return dropped


def _parts(keys: Sequence[BlockKey]) -> Iterator[Sequence[BlockKey]]:
    for start in range(0, len(keys), _LOOKS_PER_HOLD):
        yield keys[start : start + _LOOKS_PER_HOLD]
