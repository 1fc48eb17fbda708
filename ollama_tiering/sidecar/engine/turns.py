"""Whose turn it is to compute, among the threads of all engines.

They share one interpreter, which lets a thread that computes go on for milliseconds. An engine
gives up on a look-up after 80 ms, but a plan for a million tokens takes the better part of a
second. So long work is done in pieces, one piece of one engine at a time, and none is begun while a
look-up is being answered.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterable, Iterator
from itertools import islice
from typing import Final, TypeVar

PIECE_PLANS: Final = 64  # blocks that are planned in one piece: about a millisecond
_PATIENCE_SECONDS: Final = 0.25  # a piece waits so long for look-ups, however many there are

_Item = TypeVar("_Item")


class Turns:
    """Thread-safe."""

    def __init__(self) -> None:
        self._piece = threading.Lock()
        self._changed = threading.Condition()
        self._look_ups = 0

    @contextlib.contextmanager
    def look_up(self) -> Iterator[None]:
        """As long as it is answered, no piece of another's work is begun."""
        with self._changed:
            self._look_ups += 1
        try:
            yield
        finally:
            with self._changed:
                self._look_ups -= 1
                self._changed.notify_all()

    @contextlib.contextmanager
    def piece(self) -> Iterator[None]:
        """A piece of long work. Nothing that waits for a disk or for another thread."""
        with self._piece:
            with self._changed:
                self._changed.wait_for(lambda: not self._look_ups, _PATIENCE_SECONDS)
            yield

    def taken(self, items: Iterable[_Item], at_a_time: int) -> Iterator[_Item]:
        """The items, so many of them made in one piece."""
        source = iter(items)
        made: list[_Item] = []
        while True:
            with self.piece():
                made = list(islice(source, at_a_time))
            yield from made
            if len(made) < at_a_time:
                return
