"""The shared budget under every order of events: two sidecars take turns at each call of the tier.

Two threads, but only one runs at a time; a seeded choice says which goes on at every call either
makes of the directory. So a scan of one meets claims, writes and removals of the other anywhere.
"""

from __future__ import annotations

import random
import shutil
import tempfile
import threading
from pathlib import Path

from ollama_tiering.store.memory_tier import MemoryTier
from ollama_tiering.store.shared_fs import SharedFsTier
from ollama_tiering.store.tier import TierKind
from tests.contract.faulty import Faults, FaultyTier
from tests.unit.store.support import FILE_BYTES, Bench

SEEDS = 40
ROUNDS = 12


class Turns(Faults):
    """The `Faults` of both sidecars' tiers: before every operation, somebody is chosen to go on."""

    def __init__(self, seed: int, directory: Path, budget_bytes: int) -> None:
        super().__init__()
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
            self._choose()
            assert self._turn.wait_for(lambda: self._whose == who, timeout=30)

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
    filled = []
    for seed in range(SEEDS):
        root = Path(tempfile.mkdtemp(dir="/dev/shm" if Path("/dev/shm").is_dir() else None))
        try:
            filled.append(play(seed, root / "remote"))
        finally:
            shutil.rmtree(root)
    # The budget is not held by writing nothing.
    assert sum(filled) / len(filled) > 0.5


def play(seed: int, directory: Path) -> float:
    choose = random.Random(seed)
    budget = choose.randint(2, 12) * FILE_BYTES
    turns = Turns(seed, directory, budget)
    benches = []
    for _ in range(2):
        tier = FaultyTier(SharedFsTier(directory), turns)
        ram = (MemoryTier(TierKind.RAM), 64 * FILE_BYTES)
        benches.append(Bench(tiers=[ram, (tier, budget)]))
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
                bench.tick(own.choice([1, 6, 150]))
                mover = bench.store._remote
                assert mover is not None
                for _ in range(own.randint(1, 8)):
                    mover.step()
        except BaseException as error:
            errors.append(error)
        finally:
            turns.end()

    threads = [threading.Thread(target=live, args=(who,)) for who in range(2)]
    turns.begin({0, 1})
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for bench in benches:
        bench.store.close(drain_seconds=0)
    if errors:
        raise AssertionError(f"seed {seed}: {errors[0]!r}") from errors[0]
    return turns.most_bytes / budget
