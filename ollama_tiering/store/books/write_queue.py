"""Blocks that wait to be written down a level, first in first out. Pure; the store holds the lock.

Parents are queued before their children, so that what reaches the disk in time is a usable chain.
A tail block may be told to wait a little: often a longer one replaces it before it is written.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterator
from itertools import islice

from ollama_tiering.store.block.key import BlockKey


class WriteQueue:
    def __init__(self) -> None:
        self._waiting: OrderedDict[BlockKey, int] = OrderedDict()
        self._not_before: dict[BlockKey, float] = {}
        self.waiting_bytes = 0

    def __len__(self) -> int:
        return len(self._waiting)

    def __contains__(self, key: BlockKey) -> bool:
        return key in self._waiting

    def __iter__(self) -> Iterator[BlockKey]:
        """The one that waits longest first."""
        return iter(self._waiting)

    def add(self, key: BlockKey, file_bytes: int, *, not_before: float | None = None) -> None:
        if key not in self._waiting:
            self._waiting[key] = file_bytes
            self.waiting_bytes += file_bytes
            if not_before is not None:
                self._not_before[key] = not_before

    def ready(self, now: float, most: int) -> list[BlockKey]:
        """Those that wait longest of those that need not wait any more."""
        found: list[BlockKey] = []
        if len(self._not_before) < len(self._waiting):
            now_ready = (key for key in self._waiting if key not in self._not_before)
            found = list(islice(now_ready, most))
        due = (key for key, moment in self._not_before.items() if moment <= now)
        return found + list(islice(due, most - len(found)))

    def hurry(self) -> None:
        """Nothing needs to wait any more."""
        self._not_before.clear()

    def discard(self, key: BlockKey) -> None:
        self.waiting_bytes -= self._waiting.pop(key, 0)
        self._not_before.pop(key, None)

    def defer(self, key: BlockKey) -> None:
        """Moves it to the end: it could not be written now."""
        if key in self._waiting:
            self._waiting.move_to_end(key)
            self._not_before.pop(key, None)
