"""The shared budget under every order of events: sidecars take turns at each call of the tier.

Two or three threads, but only one runs at a time; a seeded choice says which goes on at every call
any of them makes of the directory. So a scan of one meets claims, writes and removals of the others
anywhere.
"""

from __future__ import annotations

import os
import random
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any, TypeVar

from ollama_tiering.store.tiers.contract import Neighbour, StoredBlock, Tier, TierKind
from ollama_tiering.store.tiers.memory import MemoryTier
from ollama_tiering.store.tiers.shared_directory import SharedFsTier
from ollama_tiering.store.upkeep.rescan import SETTLE_SECONDS
from tests.contract.faulty import Faults, FaultyTier
from tests.places import short_directory
from tests.unit.store.support import FILE_BYTES, Bench

T = TypeVar("T")

SEEDS = int(os.environ.get("TIERING_EXAMPLES", "25"))
ROUNDS = 12


class Turns(Faults):
    """The `Faults` of both sidecars' tiers: before every operation, somebody is chosen to go on."""

    def __init__(
        self, seed: int, directory: Path, budget_bytes: int, *, cached: bool = False
    ) -> None:
        super().__init__()
        self.now = 1000.0
        self.listings: list[tuple[float, list[StoredBlock]]] = []  # what there was, and when
        self.neighbours: list[tuple[float, set[str]]] = []
        self._observer = SharedFsTier(directory) if cached else None
        self.random = random.Random(seed)
        self.directory = directory
        self.budget_bytes = budget_bytes
        self.most_bytes = 0
        self._names: dict[int, int] = {}  # thread -> who
        self._running: set[int] = set()
        self._turn = threading.Condition()
        self._whose = 0

    def take_part(self, who: int) -> None:
        with self._turn:
            self._names[threading.get_ident()] = who

    def begin(self, everybody: set[int]) -> None:
        self._running = set(everybody)

    def end(self) -> None:
        with self._turn:
            self._running.discard(self._names[threading.get_ident()])
            self._choose()

    def before(self, operation: str) -> None:
        who = self._names.get(threading.get_ident())
        if who is None:
            return
        with self._turn:
            self.check()
            if self._observer is not None:
                self.listings.append((self.now, list(self._observer.scan())))
                names = {neighbour.owner for neighbour in self._observer.neighbours()}
                self.neighbours.append((self.now, names))
            self._choose()
            assert self._turn.wait_for(lambda: self._whose == who, timeout=30)

    def past(self, history: list[tuple[float, T]]) -> T:
        """Any state of the last minute, the newest one included."""
        recent = [seen for when, seen in history if when > self.now - SETTLE_SECONDS]
        return self.random.choice([*recent, history[-1][1]])

    def check(self) -> None:
        files = [*self.directory.rglob("*.kvb"), *self.directory.rglob("*.bad")]
        files += [path for path in self.directory.rglob("*.tmp") if len(path.name) > 64]
        used = 0
        for path in files:
            used += path.stat().st_blocks * 512
        self.most_bytes = max(self.most_bytes, used)
        assert used <= self.budget_bytes, f"{used / FILE_BYTES} blocks"

    def _choose(self) -> None:
        if self._running:
            self._whose = self.random.choice(sorted(self._running))
            self._turn.notify_all()


def test_the_budget_holds_in_every_order() -> None:
    filled = [play(seed) for seed in range(SEEDS)]
    assert sum(filled) / len(filled) > 0.5  # the budget is not held by writing nothing


def test_the_budget_holds_though_directories_are_seen_as_they_were() -> None:
    """As on NFS: a listing may be a minute old, what is opened is not."""
    filled = [play(seed, cached=True) for seed in range(SEEDS)]
    assert sum(filled) / len(filled) > 0.3


class CachedTier(FaultyTier):
    """Lists the directory as it was at some time of the last minute, by the clock of the test."""

    caches_names = True

    def __init__(self, inner: SharedFsTier, turns: Turns) -> None:
        super().__init__(inner, turns)
        self.turns = turns

    def scan(self) -> Iterator[StoredBlock]:
        self.faults.before("scan")
        for stored in self.turns.past(self.turns.listings):
            self.faults.before("scan")
            yield stored

    def announce(self, generation: int, claim_bytes: int) -> float:
        super().announce(generation, claim_bytes)
        return self.turns.now

    def neighbours(self) -> list[Neighbour]:
        names = self.turns.past(self.turns.neighbours)
        return [neighbour for neighbour in super().neighbours() if neighbour.owner in names]


class OneClock(Bench):
    """The time is the same for all."""

    def __init__(self, turns: Turns, **options: Any) -> None:
        self.turns = turns
        super().__init__(**options)

    @property
    def now(self) -> float:  # type: ignore[override]
        return self.turns.now

    @now.setter
    def now(self, value: float) -> None:
        self.turns.now = value


def play(seed: int, *, cached: bool = False) -> float:
    """How much of the budget was taken at the most."""
    with short_directory(in_memory=True) as root:
        return _play(seed, root / "remote", cached)


def _play(seed: int, directory: Path, cached: bool) -> float:
    directory.mkdir(mode=0o700)
    choose = random.Random(seed)
    budget = choose.randint(2, 12) * FILE_BYTES
    turns = Turns(seed, directory, budget, cached=cached)
    benches: list[Bench] = []
    sidecars = choose.choice([2, 2, 3])
    for _ in range(sidecars):
        inner = SharedFsTier(directory)
        tier = CachedTier(inner, turns) if cached else FaultyTier(inner, turns)
        tiers: list[tuple[Tier, int]] = [(MemoryTier(TierKind.RAM), 64 * FILE_BYTES)]
        tiers.append((tier, budget))
        benches.append(OneClock(turns, tiers=tiers) if cached else Bench(tiers=tiers))
    errors: list[BaseException] = []

    def live(who: int) -> None:
        bench = benches[who]
        own = random.Random(f"{seed} {who}")
        turns.take_part(who)
        try:
            turns.before("start")
            for round_ in range(ROUNDS):
                for _ in range(own.randint(0, 3)):
                    bench.put([1000 * who + 100 * round_ + own.randint(0, 99)])
                bench.tick(own.choice([1, 6, 40, 150]))
                mover = bench.store._remote
                assert mover is not None
                for _ in range(own.randint(1, 8)):
                    mover.step()
        except BaseException as error:
            errors.append(error)
        finally:
            turns.end()

    threads = [threading.Thread(target=live, args=(who,)) for who in range(sidecars)]
    turns.begin(set(range(sidecars)))
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for bench in benches:
        bench.store.close(drain_seconds=0)
    if errors:
        raise AssertionError(f"seed {seed}: {errors[0]!r}") from errors[0]
    return turns.most_bytes / budget
