"""What stays in a full tier: made-up days of prompts replayed by today's rules and by others."""

from __future__ import annotations

import contextlib
from collections import OrderedDict
from collections.abc import Callable, Hashable, Iterable, Iterator
from dataclasses import dataclass
from typing import Any, Final, TypeVar
from unittest import mock

from measure.results import Ratio, Section
from measure.store.replay import BlockTree, ByteLru, Found, Replay, entering
from measure.store.traces import TRACES, Ask, Words

K = TypeVar("K", bound=Hashable)

_TIERS: Final = (48_000, 160_000)  # real tokens that the disk has room for
_SMALL_SHARE: Final = 0.1  # of S3-FIFO's first queue
_GHOSTS: Final = 1 << 13


class PlainLru(ByteLru[K]):
    """What was used last, written or asked for, goes last."""

    def add(self, key: K, stored_bytes: int, *, oldest: bool = False, hit: bool = False) -> None:
        super().add(key, stored_bytes, oldest=oldest)

    def touch(self, keys: Iterable[K], *, hit: bool = False) -> None:
        super().touch(keys)


class S3Fifo(ByteLru[K]):
    """Three FIFO queues (Yang, Zhang, Qiu, Yue, Vinayak: "FIFO queues are all you need for cache
    eviction", SOSP 2023): a small one, the main one, and names of what left the small one. What
    hangs on a chain waits for its children here, too.
    """

    def __init__(self, budget_bytes: int) -> None:
        super().__init__(budget_bytes)
        self._asked: dict[K, int] = {}
        self._ghosts: OrderedDict[K, None] = OrderedDict()

    def add(self, key: K, stored_bytes: int, *, oldest: bool = False, hit: bool = False) -> None:
        again = key in self._protected or self._ghosts.pop(key, self) is None
        super().add(key, stored_bytes, oldest=oldest, hit=again)

    def touch(self, keys: Iterable[K], *, hit: bool = False) -> None:
        for key in keys if hit else ():
            self._asked[key] = min(3, self._asked.get(key, 0) + 1)

    def retire(self, key: K) -> Any:
        if key in self._probation:
            self._ghosts[key] = None
            if len(self._ghosts) > _GHOSTS:
                self._ghosts.popitem(last=False)
        self._asked.pop(key, None)
        return super().retire(key)

    def __iter__(self) -> Iterator[K]:
        """First to be evicted first; those that were asked for get another round."""
        small, main = self._probation, self._protected
        if sum(small.values()) >= _SMALL_SHARE * self.budget_bytes or not main:
            yield from self._round(small)
            yield from self._round(main)
        else:
            yield from self._round(main)
            yield from self._round(small)

    def _round(self, queue: OrderedDict[K, int]) -> Iterator[K]:
        for key in list(queue):
            if self._asked.get(key, 0):
                self._asked[key] -= 1
                stored_bytes = self.remove(key)
                super().add(key, stored_bytes, hit=True)
            else:
                yield key
        yield from [key for key in queue if self._asked.get(key, 0)]

    def _bound_protected(self) -> None:
        pass


@dataclass(frozen=True, slots=True)
class _Rules:
    name: str
    lru: type[ByteLru[Any]]
    turns: bool = True  # whether the latest turn of a conversation is known


_NOW: Final = _Rules("now", ByteLru)
_OTHERS: Final = (
    _Rules("SLRU alone", ByteLru, turns=False),
    _Rules("LRU", PlainLru, turns=False),
    _Rules("S3-FIFO", S3Fifo, turns=False),
)


def measure(say: Callable[[str], None]) -> Section:
    """Takes minutes."""
    ratios = []
    for name, trace in TRACES.items():
        asks = list(trace(Words()))
        for tier in _TIERS:
            say(f"{name}, a tier of {tier:,} tokens")
            now, *others = (replayed(asks, tier, rules) for rules in (_NOW, *_OTHERS))
            ratios.append(_ratio(f"{name}, {tier:,} tokens", now, others))
            say(f"  {ratios[-1].measured}; {ratios[-1].against}")
    notes = [
        "Measured: prompt tokens that the store had, of those asked for. Live: of what the watched "
        "conversation had stored before, how much was found. Ratio: now ÷ SLRU alone.",
        "Traces are made up (measure/store/traces.py), the books are the store's own, and no bytes "
        "are moved. One tier, the disk; the same chains, holds and order of leaves for all rules.",
    ]
    return Section("keep", "What a full tier keeps", "now ÷ SLRU alone", ratios, notes)


def replayed(asks: Iterable[Ask], tier: int, rules: _Rules = _NOW) -> Found:
    """`tier` is in real tokens."""
    with _without_turns() if not rules.turns else contextlib.nullcontext():
        return Replay(0, tier, rules.lru).all(asks)


@contextlib.contextmanager
def _without_turns() -> Iterator[None]:
    """As the store was before it knew turns."""
    with (
        mock.patch.object(BlockTree, "_goes_on", return_value=False),
        mock.patch.object(entering, "note_turn"),
    ):
        yield


def _ratio(what: str, now: Found, others: list[Found]) -> Ratio:
    before = others[0]
    against = ", ".join(
        f"{rules.name} {_words(found)}" for rules, found in zip(_OTHERS, others, strict=True)
    )
    value = now.matched / before.matched if before.matched else 1.0
    return Ratio(what, _words(now), against, value, 1.0)


def _words(found: Found) -> str:
    live = f" (live {100 * found.live_share:.0f} %)" if found.live_asked else ""
    return f"{100 * found.share:.1f} %{live}"
