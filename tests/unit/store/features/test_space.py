"""Physical budgets and the free-space floor: nothing beside the blocks is forgotten."""

from __future__ import annotations

import os
import types
from pathlib import Path

import pytest

from measure.store import samples
from ollama_tiering.store.books.policy import StorePolicy
from ollama_tiering.store.serving.session import Outcome
from ollama_tiering.store.tiers.contract import TierKind
from ollama_tiering.store.tiers.directory import FsTier
from ollama_tiering.store.tiers.space import CACHE_SECONDS, FreeSpace
from ollama_tiering.store.upkeep import unusable
from tests.unit.store.support import FILE_BYTES, NAMESPACE, NS, Bench, keys_of, path_of


def physical_bytes(root: Path) -> int:
    return sum(path.lstat().st_blocks * 512 for path in [root, *root.rglob("*")])


class Disk:
    """What statvfs says, in blocks of FILE_BYTES: it knows what the tier and others hold."""

    def __init__(self, total: int, monkeypatch: pytest.MonkeyPatch) -> None:
        self.total = total
        self.others = 0
        self.bench: Bench | None = None
        self.asked = 0
        monkeypatch.setattr(os, "statvfs", self.statvfs)

    def statvfs(self, path: object) -> object:
        self.asked += 1
        held = len(self.bench.in_tier(0)) if self.bench else 0
        free = self.total - self.others - held
        return types.SimpleNamespace(f_blocks=self.total, f_bavail=free, f_frsize=FILE_BYTES)


@pytest.fixture
def disk(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Disk:
    """100 blocks large, 10 to be left free, with a store of its own on it."""
    disk = Disk(100, monkeypatch)
    bench = Bench(ram=None, local=1000)
    bench.state.levels[0].space = FreeSpace(tmp_path, 10, lambda: bench.now)
    disk.bench = bench
    return disk


def fill(disk: Disk, blocks: int) -> None:
    assert disk.bench is not None
    for token in range(blocks):
        disk.bench.put([1000 + token])


def test_everything_a_tier_writes_is_counted(tmp_path: Path) -> None:
    tier = FsTier(TierKind.LOCAL, tmp_path / "local")
    bench = Bench(tiers=[(tier, 1 << 20)], index_path=tmp_path / "index.sqlite")
    blocks = [block for n in range(10) for block in bench.put([n])]
    bench.store.flush_index()
    level = bench.state.levels[0]
    assert level.physical_bytes == physical_bytes(tmp_path / "local")
    bench.store.remove_seq(NAMESPACE, [blocks[0].key])
    unusable.quarantine(bench.state, level, NAMESPACE, blocks[1].key)
    assert level.physical_bytes == physical_bytes(tmp_path / "local")
    before = level.physical_bytes
    bench.store.close()
    bench.tiers = [(FsTier(TierKind.LOCAL, tmp_path / "local"), 1 << 20)]
    bench.open()
    level = bench.state.levels[0]
    assert level.physical_bytes == physical_bytes(tmp_path / "local")
    assert level.physical_bytes == before
    bench.store.close()


def test_the_index_counts_against_the_tier_it_lies_in(tmp_path: Path) -> None:
    budget = 20 << 20
    local = tmp_path / "local"
    tier = FsTier(TierKind.LOCAL, local)
    bench = Bench(tiers=[(tier, budget)], index_path=local / "index.sqlite")
    for number in range(300):
        bench.put([number, number + 1])
        if number % 20 == 0:
            bench.store.flush_index()
            assert physical_bytes(local) <= budget
    bench.store.flush_index()
    assert (local / "index.sqlite").stat().st_size > 0
    assert bench.state.levels[0].physical_bytes == physical_bytes(local)
    assert bench.state.levels[0].lru.counted_bytes <= budget
    bench.store.close()


def test_a_directory_goes_with_its_last_block(tmp_path: Path) -> None:
    tier = FsTier(TierKind.LOCAL, tmp_path / "local")
    bench = Bench(tiers=[(tier, 1 << 20)])
    (block,) = bench.put([1])
    path = path_of(tier, block.key)
    bench.store.remove_seq(NAMESPACE, [block.key])
    assert not path.parent.exists()
    bench.put([1])
    assert path.exists()
    bench.store.remove_seq(NAMESPACE, [block.key])
    bench.store.close()
    again = FsTier(TierKind.LOCAL, tmp_path / "local")
    assert list(again.scan()) == []
    assert not path.parent.parent.exists()  # nor does a model without blocks leave a description
    again.close()


def test_a_lowered_budget_evicts_down_to_it_once_leases_end() -> None:
    bench = Bench(ram=None, local=10)
    blocks = bench.put(range(40))
    lease = bench.lease(blocks[:6])
    bench.state.levels[0].lru.budget_bytes = 3 * FILE_BYTES
    bench.store.run_pending()
    assert bench.in_tier(0) == keys_of(blocks[:6])
    bench.store.release(lease)
    bench.store.run_pending()
    assert bench.in_tier(0) == keys_of(blocks[:3])


def test_a_lowered_ram_budget_waits_until_blocks_are_written_down() -> None:
    bench = Bench(ram=8, local=16)
    blocks = bench.put(range(32))
    bench.state.levels[0].lru.budget_bytes = 2 * FILE_BYTES
    bench.store.run_pending()
    assert bench.in_tier(1) == keys_of(blocks)
    assert len(bench.in_tier(0)) <= 2


def test_at_the_floor_a_new_block_takes_the_place_of_an_old_one(disk: Disk) -> None:
    assert disk.bench is not None
    fill(disk, 95)
    assert len(disk.bench.in_tier(0)) == 90
    report = disk.bench.store.report()
    assert report.tiers[0].stats.evicted_blocks == 5
    assert not report.tiers[0].disk_full


def test_below_the_floor_nothing_is_written_and_nothing_evicted_for_it(disk: Disk) -> None:
    bench = disk.bench
    assert bench is not None
    fill(disk, 50)
    disk.others = 41
    bench.tick()
    for token in range(20):
        (reserved,) = bench.reserve(samples.sequence(NS, [token]))
        assert reserved.outcome is Outcome.NO_ROOM
    assert len(bench.in_tier(0)) == 50
    report = bench.store.report()
    assert report.tiers[0].disk_full
    assert report.not_written == {"disk full": 20}
    assert report.tiers[0].reserved_bytes == 0


def test_what_is_missing_is_given_back_and_no_more(disk: Disk) -> None:
    bench = disk.bench
    assert bench is not None
    fill(disk, 50)
    disk.others = 45
    bench.tick(20)
    bench.store.run_pending()
    assert len(bench.in_tier(0)) == 45
    bench.tick(20)
    bench.store.run_pending()
    assert len(bench.in_tier(0)) == 45
    disk.others = 500
    bench.tick(20)
    bench.store.run_pending()
    assert len(bench.in_tier(0)) == 0


def test_others_that_take_what_was_freed_get_no_more_for_a_while(disk: Disk) -> None:
    bench = disk.bench
    assert bench is not None
    fill(disk, 50)
    disk.others = 45
    bench.tick(20)
    bench.store.run_pending()
    disk.others = 50
    bench.store.run_pending()
    assert len(bench.in_tier(0)) == 45


def test_the_file_system_is_asked_now_and_then_only(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    disk = Disk(100, monkeypatch)
    now = [0.0]
    space = FreeSpace(tmp_path, 10, lambda: now[0])
    assert space.headroom_bytes() == 90 * FILE_BYTES
    space.take(FILE_BYTES)
    assert space.headroom_bytes() == 89 * FILE_BYTES
    assert disk.asked == 1
    now[0] += CACHE_SECONDS
    assert space.headroom_bytes() == 90 * FILE_BYTES
    now[0] -= 1000  # a clock that goes back
    space.headroom_bytes()
    assert disk.asked == 3


def test_a_disk_that_does_not_answer_is_not_written_to_and_loses_nothing(
    disk: Disk, monkeypatch: pytest.MonkeyPatch
) -> None:
    bench = disk.bench
    assert bench is not None
    fill(disk, 50)

    def gone(path: object) -> object:
        raise OSError(5, "input/output error")

    monkeypatch.setattr(os, "statvfs", gone)
    for token in range(10):
        bench.tick(20)
        (reserved,) = bench.reserve(samples.sequence(NS, [token]))
        assert reserved.outcome is Outcome.NO_ROOM
        bench.store.run_pending()
    assert len(bench.in_tier(0)) == 50
    monkeypatch.setattr(os, "statvfs", disk.statvfs)
    bench.tick(20)
    bench.put([1])


def test_the_policy_puts_a_floor_under_the_local_tier_only(tmp_path: Path) -> None:
    tiers = [
        (FsTier(TierKind.RAM, tmp_path / "ram"), 1 << 20),
        (FsTier(TierKind.LOCAL, tmp_path / "local"), 1 << 20),
    ]
    bench = Bench(tiers=list(tiers), policy=StorePolicy(min_free_percent=1))
    assert [level.space is not None for level in bench.state.levels] == [False, True]
    bench.store.close()
