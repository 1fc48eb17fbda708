"""Byte-budgeted, segmented LRU. Pure: no I/O, no clock, not thread-safe; the store holds the lock.

What was only written goes before what was asked for again (SLRU: Karedla, Love, Wherry, "Caching
strategies to improve disk system performance", IEEE Computer 27(3), 1994): an entry starts on
probation, a hit protects it; the protected ones have at most `PROTECTED_SHARE` of the budget, the
oldest of them fall back to probation.

Invariant: used + reserved + overhead <= budget after every successful reserve. Only `add`, which
records what a directory already holds, and `commit` with more bytes than were reserved can go over
it; `excess_bytes` says by how much.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Hashable, Iterable, Iterator
from itertools import chain
from typing import Final, Generic, TypeVar

PROTECTED_SHARE: Final = 0.8

K = TypeVar("K", bound=Hashable)


class Reservation(Generic[K]):
    """Bytes that are set aside, until `commit` or `release`."""

    def __init__(self, lru: ByteLru[K], reserved_bytes: int) -> None:
        self._lru = lru
        self.reserved_bytes = reserved_bytes
        self.ended: Callable[[], None] | None = None  # called once, when the reservation ends
        self._open = True

    def commit(self, key: K, stored_bytes: int) -> None:
        """Turns the reservation into an entry of what was really stored."""
        if self._open:
            self.release()
            self._lru.add(key, stored_bytes)

    def shrink(self, given_bytes: int) -> None:
        """Gives a part back: it is counted elsewhere now."""
        if self._open:
            given_bytes = max(0, min(given_bytes, self.reserved_bytes))
            self.reserved_bytes -= given_bytes
            self._lru.reserved_bytes -= given_bytes

    def release(self) -> None:
        if self._open:
            self._open = False
            self._lru.reserved_bytes -= self.reserved_bytes
            if self.ended is not None:
                self.ended()


class ByteLru(Generic[K]):
    """Least valuable first, by physical bytes. One owner of every number in it."""

    def __init__(self, budget_bytes: int) -> None:
        self.budget_bytes = budget_bytes
        self.used_bytes = 0
        self.reserved_bytes = 0
        self.overhead_bytes = 0  # files that are not blocks: quarantine, directories, index
        self._probation: OrderedDict[K, int] = OrderedDict()
        self._protected: OrderedDict[K, int] = OrderedDict()
        self._protected_bytes = 0
        self._holds: dict[K, int] = {}

    def __len__(self) -> int:
        return len(self._probation) + len(self._protected)

    def __contains__(self, key: K) -> bool:
        return key in self._probation or key in self._protected

    def __iter__(self) -> Iterator[K]:
        """First to be evicted first."""
        return chain(self._probation, self._protected)

    def segments(self) -> tuple[Iterable[K], Iterable[K]]:
        """Probation and protected, each least recently used first."""
        return self._probation, self._protected

    def __reversed__(self) -> Iterator[K]:
        return chain(reversed(self._protected), reversed(self._probation))

    @property
    def counted_bytes(self) -> int:
        """All that counts against the budget."""
        return self.used_bytes + self.reserved_bytes + self.overhead_bytes

    @property
    def excess_bytes(self) -> int:
        return max(0, self.counted_bytes - self.budget_bytes)

    def shortfall_bytes(self, need_bytes: int) -> int:
        """What must be freed before `need_bytes` can be reserved."""
        return max(0, self.counted_bytes + need_bytes - self.budget_bytes)

    def reserve(self, need_bytes: int) -> Reservation[K] | None:
        if self.shortfall_bytes(need_bytes):
            return None
        self.reserved_bytes += need_bytes
        return Reservation(self, need_bytes)

    def add(self, key: K, stored_bytes: int, *, oldest: bool = False, hit: bool = False) -> None:
        """Records an entry as most (or least) recently used; the same key again replaces it."""
        hit = hit or key in self._protected
        self.remove(key)
        self.used_bytes += stored_bytes
        segment = self._protected if hit else self._probation
        segment[key] = stored_bytes
        if oldest:
            segment.move_to_end(key, last=False)
        if hit:
            self._protected_bytes += stored_bytes
            self._bound_protected()

    def resize(self, key: K, stored_bytes: int) -> None:
        """Another size of an entry that stays where it is."""
        change = stored_bytes - self.stored_bytes(key)
        if key in self._probation:
            self._probation[key] = stored_bytes
        elif key in self._protected:
            self._protected[key] = stored_bytes
            self._protected_bytes += change
        else:
            return
        self.used_bytes += change

    def remove(self, key: K) -> int:
        """Bytes given back; 0 when there is no such entry."""
        stored_bytes = self._probation.pop(key, None)
        if stored_bytes is None:
            stored_bytes = self._protected.pop(key, 0)
            self._protected_bytes -= stored_bytes
        self.used_bytes -= stored_bytes
        return stored_bytes

    def retire(self, key: K) -> Reservation[K]:
        """Takes the entry out but keeps its bytes reserved until the file is really gone."""
        stored_bytes = self.remove(key)
        self.reserved_bytes += stored_bytes
        return Reservation(self, stored_bytes)

    def stored_bytes(self, key: K) -> int:
        return self._probation.get(key) or self._protected.get(key, 0)

    def touch(self, keys: Iterable[K], *, hit: bool = False) -> None:
        """Makes them the most recently used of their segment, the last one most; a hit protects.

        Keys that are no entries are passed over.
        """
        protected, probation = self._protected, self._probation
        for key in keys:
            if key in protected:
                protected.move_to_end(key)
            elif key in probation:
                if hit:
                    stored_bytes = probation.pop(key)
                    protected[key] = stored_bytes
                    self._protected_bytes += stored_bytes
                else:
                    probation.move_to_end(key)
        if hit:
            self._bound_protected()

    def demote(self, key: K) -> None:
        """Makes it the first to be evicted."""
        if key in self:
            stored_bytes = self.remove(key)
            self.add(key, stored_bytes, oldest=True)

    def _bound_protected(self) -> None:
        most = int(PROTECTED_SHARE * self.budget_bytes)
        while self._protected_bytes > most and len(self._protected) > 1:
            key, stored_bytes = self._protected.popitem(last=False)
            self._protected_bytes -= stored_bytes
            self._probation[key] = stored_bytes

    def hold(self, key: K) -> None:
        """Excludes the key from eviction until let go as often; it need not be an entry yet."""
        self._holds[key] = self._holds.get(key, 0) + 1

    def let_go(self, key: K) -> None:
        left = self._holds.get(key, 0) - 1
        if left > 0:
            self._holds[key] = left
        else:
            self._holds.pop(key, None)

    def held(self, key: K) -> bool:
        return key in self._holds

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
        for key in self:
            candidate: K | None = key
            while candidate is not None and freed < need_bytes:
                if candidate in self._holds or not may_evict(candidate):
                    passed.add(candidate)
                    break
                chosen.append(candidate)
                freed += self.stored_bytes(candidate)
                passed.discard(candidate)
                follow = unblocks(candidate)
                candidate = follow if follow in passed else None
            if freed >= need_bytes:
                return chosen
        return chosen if partial else []
