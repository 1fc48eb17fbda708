"""A remote tier that fails, hangs or crawls: a miss and a rest, never anybody else's problem."""

from __future__ import annotations

import contextlib
import errno
import os
import statistics
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from pathlib import Path

import pytest

from measure.store import samples
from ollama_tiering.store.block.key import BlockKey, NamespaceId
from ollama_tiering.store.tiered import TieredStore
from ollama_tiering.store.tiers.contract import OpenBlock, Tier, TierKind
from ollama_tiering.store.tiers.memory import MemoryTier
from tests.contract.faulty import WEATHER, Faults, remote_tier
from tests.unit.store.remote_bench import RemoteBench, demoted, files
from tests.unit.store.support import BLOCK_TOKENS, FILE_BYTES, NAMESPACE, NS, Bench, keys_of

pytestmark = pytest.mark.fault

DEADLINE = 0.1
SLOW_MACHINE_SECONDS = 2.0  # what anything that does not wait for a hang may take here
OPERATIONS = (
    "mount",
    "scan",
    "create",
    "write_at",
    "publish",
    "discard",
    "open",
    "read_at",
    "remove",
    "describe",
    "drop_pages",
    "probe",
    "announce",
    "neighbours",
    "touch",
)


class HangingBench(RemoteBench):
    """Few threads to lose; a short deadline only while something hangs: the machine is busy."""

    def hang(self, *operations: str) -> None:
        self.threads.deadline_seconds = DEADLINE
        self.faults.hang(*operations)

    def heal(self) -> None:
        self.faults.heal()
        until(lambda: not self.threads.stalled)
        self.threads.deadline_seconds = SLOW_MACHINE_SECONDS

    def open(self) -> None:
        assert self.tiers[-1][0].directory is not None
        tier = remote_tier(
            self.tiers[-1][0].directory,
            self.faults,
            deadline_seconds=SLOW_MACHINE_SECONDS,
            max_threads=4,
        )
        self.threads = tier._threads
        self.tiers[-1] = (tier, self.tiers[-1][1])
        self.options["staging_seconds"] = (
            SLOW_MACHINE_SECONDS  # the tier's own deadline comes first
        )
        super().open()


@pytest.fixture
def bench(tmp_path: Path) -> Iterator[HangingBench]:
    opened = HangingBench(tmp_path / "remote")
    yield opened
    opened.faults.heal()
    opened.store.close(drain_seconds=0)


def settle(bench: RemoteBench) -> None:
    """Time passes until every rest is over and everything that can be moved has been."""
    for _ in range(6):
        bench.tick(100)
        bench.store.run_pending()


def until(condition: Callable[[], bool], seconds: float = 10.0) -> None:
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end
        time.sleep(0.005)


@pytest.mark.parametrize("error", [*WEATHER, "hang"])
@pytest.mark.parametrize("operation", OPERATIONS)
def test_weather_in_any_operation_loses_nothing_and_passes(
    bench: HangingBench, operation: str, error: int | str
) -> None:
    gone = demoted(bench, range(300, 308))
    far = demoted(bench, range(200, 208))
    first = bench.put(range(4 * 6))
    settle(bench)
    if operation == "mount":
        bench.faults.fail(errno.EIO, "mount")
        bench.store.close(drain_seconds=0)
        bench.open()
    operations = (operation, "announce") if operation == "probe" else (operation,)
    bench.faults.calls.clear()
    if isinstance(error, str):
        bench.hang(*operations)
    else:
        bench.faults.fail(error, *operations)
    if operation == "discard":
        bench.state.levels[2].tier.publish = failing  # type: ignore[method-assign]
    if operation == "touch":
        for path in (bench.tiers[2][0].directory or Path()).rglob("*.kvb"):
            os.utime(path, (time.time() - 7200, time.time() - 7200))
    bench.store.open_session(NAMESPACE, NS.fields(), BLOCK_TOKENS).close()
    second = bench.put(range(100, 100 + 4 * 2))
    bench.match(range(200, 208))
    bench.store.lease(NAMESPACE, [block.key for block in far])
    bench.store.remove_seq(NAMESPACE, [block.key for block in gone])
    settle(bench)
    assert operation in bench.faults.calls
    assert bench.rows(range(4 * 6)) == 24
    assert bench.rows(range(100, 108)) == 8
    bench.heal()
    if operation == "discard":
        del bench.state.levels[2].tier.publish
    settle(bench)
    settle(bench)
    assert bench.store.report().tiers[2].state == "ok"
    if operation != "mount":  # that was a restart without an index of what is remote only
        assert bench.rows(range(300, 308)) == 0
    assert bench.rows(range(200, 208)) == 8
    assert bench.rows(range(4 * 6)) == 24
    assert bench.rows(range(100, 108)) == 8
    assert bench.in_tier(2) == files(bench.tiers[2][0].directory or Path())
    everywhere = bench.in_tier(0) | bench.in_tier(1) | bench.in_tier(2)
    assert everywhere >= keys_of(first) | keys_of(second) | keys_of(far)


def failing(*args: object, **options: object) -> int:
    raise OSError(errno.EIO, "made to fail")


@pytest.mark.parametrize("operation", ["open", "read_at"])
@pytest.mark.parametrize("error", [errno.EIO, "hang"])
def test_a_remote_hit_that_fails_is_a_miss_in_time(
    bench: HangingBench, operation: str, error: int | str
) -> None:
    blocks = demoted(bench, range(4 * 4))
    if isinstance(error, str):
        bench.hang(operation)
    else:
        bench.faults.fail(error, operation)
    start = time.monotonic()
    leased = bench.store.lease(NAMESPACE, [block.key for block in blocks])
    assert time.monotonic() - start < 3 * DEADLINE + SLOW_MACHINE_SECONDS
    assert leased.blocks == []
    assert bench.store.report().tiers[2].state == "resting"
    # From now on it is not even tried:
    assert bench.match(range(16)) == []
    bench.faults.calls.clear()
    start = time.monotonic()
    assert bench.store.lease(NAMESPACE, [block.key for block in blocks]).blocks == []
    assert time.monotonic() - start < SLOW_MACHINE_SECONDS
    assert bench.faults.calls == []
    assert sum(bench.store.report().counters.misses.values()) >= 3
    # It comes back by itself, and nothing was forgotten:
    bench.heal()
    settle(bench)
    assert len(bench.store.lease(NAMESPACE, [block.key for block in blocks]).blocks) == 4


def test_a_slow_remote_gives_what_is_ready_in_time(bench: HangingBench) -> None:
    blocks = demoted(bench, range(4 * 4))
    bench.store._leaser._deadline_seconds = 1.0
    tier = bench.state.levels[2].tier
    opened, go_on = tier.open, threading.Event()

    def slow(namespace: NamespaceId, key: BlockKey) -> AbstractContextManager[OpenBlock]:
        if key == blocks[2].key:
            go_on.wait()
        return opened(namespace, key)

    tier.open = slow  # type: ignore[method-assign]
    start = time.monotonic()
    leased = bench.store.lease(NAMESPACE, [block.key for block in blocks])
    assert time.monotonic() - start < 1.0 + SLOW_MACHINE_SECONDS
    assert [block.key for block in leased.blocks] == [block.key for block in blocks[:2]]
    assert bench.store.report().counters.misses["not staged in time"] == 1
    go_on.set()


@pytest.mark.parametrize("operation", ["open", "read_at"])
def test_a_share_that_answers_but_cannot_be_read_is_not_back(
    bench: HangingBench, operation: str
) -> None:
    blocks = demoted(bench, range(4 * 4))
    bench.faults.fail(errno.EIO, operation)
    assert bench.store.lease(NAMESPACE, [block.key for block in blocks]).blocks == []
    rests = []
    for _ in range(4):
        bench.tick(1000)
        bench.store.run_pending()
        rests.append(bench.store.report().tiers[2].resting_seconds)
    assert rests == sorted(set(rests))
    # No client's call is to find that out, and nothing more is entrusted to it:
    bench.faults.calls.clear()
    assert bench.store.lease(NAMESPACE, [block.key for block in blocks]).blocks == []
    assert bench.faults.calls == []
    bench.heal()
    settle(bench)
    assert len(bench.store.lease(NAMESPACE, [block.key for block in blocks]).blocks) == 4


def test_the_circuit_opens_rests_longer_each_time_and_closes(bench: HangingBench) -> None:
    bench.look()
    bench.faults.fail(errno.EIO)
    rests = []
    for _ in range(5):
        bench.tick(1000)
        bench.store.run_pending()
        report = bench.store.report().tiers[2]
        assert report.state == "resting"
        rests.append(report.resting_seconds)
    assert rests == sorted(rests)
    assert rests[-1] > rests[0]
    bench.faults.calls.clear()
    bench.tick(1)
    bench.store.run_pending()
    assert bench.faults.calls == []  # open: nothing is tried
    bench.tick(1000)
    bench.store.run_pending()
    assert bench.faults.calls == ["probe"]  # half-open: one call
    bench.heal()
    bench.tick(1000)
    bench.store.run_pending()
    assert bench.store.report().tiers[2].state == "ok"


def test_a_mount_that_answers_again_is_used_before_its_rest_is_over(bench: HangingBench) -> None:
    bench.look()
    bench.hang()
    bench.tick(1000)
    bench.store.run_pending()
    bench.tick(1000)
    bench.store.run_pending()
    assert bench.store.report().tiers[2].resting_seconds > 1
    bench.heal()
    bench.store.run_pending()
    assert bench.store.report().tiers[2].state == "ok"


def test_a_mount_that_hangs_costs_a_bounded_number_of_threads(bench: HangingBench) -> None:
    def threads() -> set[threading.Thread]:
        return {one for one in threading.enumerate() if one.name.startswith("remote-tier")}

    others = threads()  # that earlier tests left hanging, and this one's first
    blocks = demoted(bench, range(4 * 4))
    bench.hang()
    for _ in range(20):
        bench.tick(1000)
        bench.store.run_pending()
        bench.store.lease(NAMESPACE, [block.key for block in blocks])
    assert len(threads() - others) <= 2 * 4  # two tiers were opened


# --- with its threads, as in the sidecar --------------------------------------------------------


class Running:
    """A store with background threads over memory tiers and a remote one that may hang."""

    def __init__(self, directory: Path) -> None:
        self.faults = Faults()
        self.remote = remote_tier(directory, self.faults, deadline_seconds=DEADLINE)
        self.tiers: list[tuple[Tier, int]] = [
            (MemoryTier(TierKind.RAM), 64 * FILE_BYTES),
            (MemoryTier(TierKind.LOCAL), 64 * FILE_BYTES),
            (self.remote, 64 * FILE_BYTES),
        ]

    def open(self) -> TieredStore:
        return TieredStore(self.tiers, measure=False, staging_seconds=3 * DEADLINE)


def put(store: TieredStore, tokens: range) -> list[samples.SampleBlock]:
    bench = Bench.__new__(Bench)  # of a store that is open already
    bench.store, bench.now = store, 0.0
    bench.session = store.open_session(NAMESPACE, NS.fields(), BLOCK_TOKENS)
    blocks = bench.put(tokens)
    store.close_session(bench.session)
    return blocks


def test_start_and_stop_do_not_wait_for_a_mount_that_hangs(tmp_path: Path) -> None:
    running = Running(tmp_path / "remote")
    running.faults.hang()
    start = time.monotonic()
    store = running.open()
    blocks = put(store, range(16))
    assert len(store.lease(NAMESPACE, [block.key for block in blocks]).blocks) == 4
    assert time.monotonic() - start < SLOW_MACHINE_SECONDS
    until(lambda: store.report().tiers[2].state == "resting")
    until(lambda: store.report().unsaved_blocks == 0)  # the local tier takes what it always took
    start = time.monotonic()
    store.close(drain_seconds=5)
    assert time.monotonic() - start < 3 * DEADLINE + SLOW_MACHINE_SECONDS
    running.faults.heal()


def test_the_scan_goes_on_while_serving(tmp_path: Path) -> None:
    running = Running(tmp_path / "remote")
    store = running.open()
    until(lambda: store.report().tiers[2].state == "ok")
    running.faults.hang("scan")
    store.close()
    running = Running(tmp_path / "remote")
    running.faults.hang("neighbours")
    store = running.open()
    blocks = put(store, range(16))
    assert store.report().tiers[2].state in ("scanning", "not looked at yet", "resting")
    assert len(store.lease(NAMESPACE, [block.key for block in blocks]).blocks) == 4
    running.faults.heal()
    until(lambda: store.report().tiers[2].state == "ok")
    store.close()


def test_hits_in_ram_take_no_longer_while_the_remote_tier_hangs(tmp_path: Path) -> None:
    running = Running(tmp_path / "remote")
    store = running.open()
    blocks = put(store, range(16))
    far = put(store, range(100, 116))
    keys, far_keys = [block.key for block in blocks], [block.key for block in far]
    until(lambda: store.report().tiers[2].state == "ok" and not store.report().unsaved_blocks)
    mover = store._remote
    assert mover is not None
    for key in far_keys:
        record = store._state.tree.get(key)
        assert record is not None
        until(lambda: mover.copy(record, store._state.levels[0], store._state.levels[2]))  # noqa: B023
        for level in store._state.levels[:2]:
            with store._state.lock:
                store._state.forget_copy(level, key)

    def p95() -> float:
        """Of five rounds the one this machine disturbed least. Others that compute take the
        processor for milliseconds at a time: from more than one call in a hundred, if it is busy.
        """
        rounds = []
        for _ in range(5):
            took = []
            for _ in range(300):
                start = time.perf_counter()
                leased = store.lease(NAMESPACE, keys)
                store.release(leased.lease_id)
                took.append(time.perf_counter() - start)
                assert len(leased.blocks) == 4
            rounds.append(statistics.quantiles(took, n=100)[94])
        return min(rounds)

    quiet = p95()
    running.faults.hang()
    stop = threading.Event()
    misses = []

    def ask_for_what_hangs() -> None:
        while not stop.is_set():
            misses.append(len(store.lease(NAMESPACE, far_keys).blocks))
            stop.wait(0.005)

    asking = [threading.Thread(target=ask_for_what_hangs, daemon=True) for _ in range(2)]
    for thread in asking:
        thread.start()
    until(lambda: store.report().tiers[2].state == "resting")
    hanging = p95()
    stop.set()
    for thread in asking:
        thread.join(5)
    assert misses
    assert not any(misses)
    assert hanging <= 2 * quiet + 1e-3, (hanging, quiet)
    running.faults.heal()
    store.close()


def test_a_removal_that_hangs_does_not_take_what_is_stored_since(bench: HangingBench) -> None:
    (block,) = demoted(bench, range(4))
    settle(bench)
    tier = bench.tiers[2][0]
    assert tier.exists(NAMESPACE, block.key)
    bench.hang("remove")
    with pytest.raises(TimeoutError):
        tier.remove(NAMESPACE, block.key)
    stored = False
    with contextlib.suppress(TimeoutError):
        _store_there(tier, block)
        stored = True
    bench.heal()
    assert tier.exists(NAMESPACE, block.key) == stored
    _store_there(tier, block)
    assert tier.exists(NAMESPACE, block.key)


def _store_there(tier: Tier, block: samples.SampleBlock) -> None:
    temp = tier.create(NAMESPACE, block.key, len(block.data))
    temp.write_at(0, block.data)
    try:
        tier.publish(temp)
    except TimeoutError:
        tier.discard(temp)
        raise
