"""Byte-budgeted LRU. Pure: no I/O, no clock, not thread-safe; the store holds the lock.

Invariant: used + reserved + overhead <= budget after every successful reserve. Only `add`, which
records what a directory already holds, and `commit` with more bytes than were reserved can go over
it; `excess_bytes` says by how much.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Hashable, Iterator
from types import TracebackType
from typing import Generic, TypeVar

K = TypeVar("K", bound=Hashable)


class Reservation(Generic[K]):
    """A claim on bytes. Ends by `commit` or `release`; leaving the `with` block releases."""

    def __init__(self, lru: ByteLru[K], reserved_bytes: int) -> None:
        self._lru = lru
        self.reserved_bytes = reserved_bytes
        self._open = True

    def commit(self, key: K, stored_bytes: int) -> None:
        """Turns the claim into an entry of what was really stored."""
        if self._open:
            self.release()
            self._lru.add(key, stored_bytes)

    def release(self) -> None:
        if self._open:
            self._open = False
            self._lru.reserved_bytes -= self.reserved_bytes

    def __enter__(self) -> Reservation[K]:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.release()


class ByteLru(Generic[K]):
    """Least recently used first, by physical bytes. One owner of every number in it."""

    def __init__(self, budget_bytes: int) -> None:
        self.budget_bytes = budget_bytes
        self.used_bytes = 0
        self.reserved_bytes = 0
        self.overhead_bytes = 0  # files that are not blocks: quarantine, index
        self._entries: OrderedDict[K, int] = OrderedDict()
        self._pins: dict[K, int] = {}

    def __len__(self) -> int:
        return len(self._entries)

    def __contains__(self, key: K) -> bool:
        return key in self._entries

    def __iter__(self) -> Iterator[K]:
        """Oldest first."""
        return iter(self._entries)

    @property
    def claimed_bytes(self) -> int:
        return self.used_bytes + self.reserved_bytes + self.overhead_bytes

    @property
    def excess_bytes(self) -> int:
        return max(0, self.claimed_bytes - self.budget_bytes)

    def shortfall_bytes(self, need_bytes: int) -> int:
        """What must be freed before `need_bytes` can be reserved."""
        return max(0, self.claimed_bytes + need_bytes - self.budget_bytes)

    def reserve(self, need_bytes: int) -> Reservation[K] | None:
        if self.shortfall_bytes(need_bytes):
            return None
        self.reserved_bytes += need_bytes
        return Reservation(self, need_bytes)

    def add(self, key: K, stored_bytes: int) -> None:
        """Records an entry as most recently used; the same key again replaces it."""
        self.used_bytes += stored_bytes - self._entries.pop(key, 0)
        self._entries[key] = stored_bytes

    def remove(self, key: K) -> int:
        """Bytes given back; 0 when there is no such entry."""
        stored_bytes = self._entries.pop(key, 0)
        self.used_bytes -= stored_bytes
        return stored_bytes

    def retire(self, key: K) -> Reservation[K]:
        """Takes the entry out but keeps its bytes claimed until the file is really gone."""
        stored_bytes = self.remove(key)
        self.reserved_bytes += stored_bytes
        return Reservation(self, stored_bytes)

    def stored_bytes(self, key: K) -> int:
        return self._entries.get(key, 0)

    def touch(self, key: K) -> None:
        if key in self._entries:
            self._entries.move_to_end(key)

    def pin(self, key: K) -> None:
        """Excludes the key from eviction until unpinned as often; it need not be an entry yet."""
        self._pins[key] = self._pins.get(key, 0) + 1

    def unpin(self, key: K) -> None:
        left = self._pins.get(key, 0) - 1
        if left > 0:
            self._pins[key] = left
        else:
            self._pins.pop(key, None)

    def pinned(self, key: K) -> bool:
        return key in self._pins

    def victims(
        self,
        need_bytes: int,
        may_evict: Callable[[K], bool],
        unblocks: Callable[[K], K | None],
        *,
        partial: bool = False,
    ) -> list[K]:
        """Oldest entries that free at least `need_bytes`; if that cannot be reached, none of them,
        or all there are with `partial`.

        `may_evict` is asked with the victims so far taken as gone. An entry it refused is asked
        again once `unblocks` names it as freed by a later victim (a parent by its last child), so
        one pass suffices.
        """
        chosen: list[K] = []
        freed = 0
        passed: set[K] = set()
        for key in self._entries:
            candidate: K | None = key
            while candidate is not None and freed < need_bytes:
                if candidate in self._pins or not may_evict(candidate):
                    passed.add(candidate)
                    break
                chosen.append(candidate)
                freed += self._entries[candidate]
                passed.discard(candidate)
                follow = unblocks(candidate)
                candidate = follow if follow in passed else None
            if freed >= need_bytes:
                return chosen
        return chosen if partial else []
