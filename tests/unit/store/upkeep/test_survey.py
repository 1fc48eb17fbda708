"""The index is a cache: the store answers from it at once, and the files have the last word."""

from __future__ import annotations

import contextlib
import dataclasses
import os
import sqlite3
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from measure.store import samples
from ollama_tiering.store.block.key import prefix_chain, tokens_to_bytes
from ollama_tiering.store.books.level import Level
from ollama_tiering.store.books.policy import StorePolicy
from ollama_tiering.store.books.state import StoreState
from ollama_tiering.store.books.tree import BlockRecord
from ollama_tiering.store.serving.session import Outcome, WriteSession
from ollama_tiering.store.tiered import TieredStore
from ollama_tiering.store.tiers.contract import StoredBlock, Tier, TierKind
from ollama_tiering.store.tiers.directory import FsTier
from ollama_tiering.store.upkeep.expiry import START_SECONDS
from tests.unit.store.support import BLOCK_TOKENS, NAMESPACE, NS, Bench, keys_of

BUDGET = 4 << 20


class SlowTier(FsTier):
    """Its scan, and then every header it is asked for, wait for the test."""

    def __init__(self, directory: Path) -> None:
        super().__init__(TierKind.LOCAL, directory)
        self.may_scan = threading.Event()
        self.may_read = threading.Event()

    def scan(self) -> Iterator[StoredBlock]:
        assert self.may_scan.wait(30)
        yield from super().scan()

    def open(self, namespace, key):  # type: ignore[no-untyped-def]
        if threading.current_thread().name == "block-survey":
            assert self.may_read.wait(30)
        return super().open(namespace, key)


@pytest.fixture
def blocks(tmp_path: Path) -> list[samples.SampleBlock]:
    """Ten blocks of one chain, on disk and in the index."""
    bench = Bench(tiers=[(FsTier(TierKind.LOCAL, tmp_path), BUDGET)], index_path=index(tmp_path))
    made = bench.put(range(40))
    bench.store.close()
    return made


def index(root: Path) -> Path:
    return root.parent / f"{root.name}.sqlite"


def open_slowly(
    root: Path, monkeypatch: pytest.MonkeyPatch, *, budget: int = BUDGET
) -> tuple[SlowTier, TieredStore]:
    monkeypatch.setattr("ollama_tiering.store.background._SURVEY_WAIT_SECONDS", 0.0)
    tier = SlowTier(root)
    return tier, TieredStore([(tier, budget)], index_path=index(root), measure=False)


def rows(store: TieredStore, tokens: range) -> int:
    data = tokens_to_bytes(tokens)
    keys = prefix_chain(NAMESPACE, data, BLOCK_TOKENS)
    return sum(block.rows for block in store.match(NAMESPACE, keys, data, BLOCK_TOKENS))


def session(store: TieredStore) -> WriteSession:
    return store.open_session(NAMESPACE, NS.fields(), BLOCK_TOKENS)


def finish(tier: SlowTier, store: TieredStore) -> None:
    tier.may_scan.set()
    tier.may_read.set()
    assert store._background.survey_thread is not None
    store._background.survey_thread.join(30)
    assert not store._background.survey_thread.is_alive()


def test_what_the_index_knows_is_served_before_a_file_was_looked_at(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, blocks: list[samples.SampleBlock]
) -> None:
    tier, store = open_slowly(tmp_path, monkeypatch)
    assert rows(store, range(40)) == 40
    leased = store.lease(NAMESPACE, [block.key for block in blocks])
    assert len(leased.blocks) == 10
    assert leased.blocks[0].path is not None
    assert Path(leased.blocks[0].path).read_bytes() == blocks[0].data
    finish(tier, store)
    assert rows(store, range(40)) == 40
    store.close()


def test_nothing_is_written_before_all_files_are_counted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, blocks: list[samples.SampleBlock]
) -> None:
    tier, store = open_slowly(tmp_path, monkeypatch)
    new = samples.sequence(NS, [77])[0].offer
    assert session(store).reserve([new])[0].outcome is Outcome.NO_ROOM
    assert not store.report().tiers[0].surveyed
    finish(tier, store)
    assert store.report().tiers[0].surveyed
    assert session(store).reserve([new])[0].outcome is Outcome.RESERVED
    store.close()


def test_a_file_that_vanished_is_a_miss_before_the_survey_and_forgotten_after(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, blocks: list[samples.SampleBlock]
) -> None:
    for path in tmp_path.rglob(f"{blocks[3].key.hex()}.kvb"):
        path.unlink()
    tier, store = open_slowly(tmp_path, monkeypatch)
    leased = store.lease(NAMESPACE, [block.key for block in blocks])
    assert len(leased.blocks) == 3
    finish(tier, store)
    assert rows(store, range(40)) == 12
    store.close()


def test_without_an_index_blocks_appear_as_they_are_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, blocks: list[samples.SampleBlock]
) -> None:
    index(tmp_path).unlink()
    tier, store = open_slowly(tmp_path, monkeypatch)
    assert rows(store, range(40)) == 0
    tier.may_scan.set()
    while not store.report().tiers[0].surveyed:
        pass
    held = sum(p.lstat().st_blocks * 512 for p in [tmp_path, *tmp_path.rglob("*")])
    assert store.report().tiers[0].used_bytes == held  # counted before they are known
    new = samples.sequence(NS, [77])[0]
    writer = session(store)
    (reserved,) = writer.reserve([new.offer])
    assert reserved.path is not None  # and there is room for more
    reserved.path.write_bytes(new.data)
    assert writer.commit([reserved.reservation_id])[0].stored
    finish(tier, store)
    assert rows(store, range(40)) == 40
    assert store.report().tiers[0].blocks == 11
    store.close()


def test_a_block_stored_again_before_its_file_was_read_counts_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, blocks: list[samples.SampleBlock]
) -> None:
    index(tmp_path).unlink()
    tier, store = open_slowly(tmp_path, monkeypatch)
    tier.may_scan.set()
    while not store.report().tiers[0].surveyed:
        pass
    writer = session(store)
    (reserved,) = writer.reserve([blocks[0].offer])
    assert reserved.path is not None
    reserved.path.write_bytes(blocks[0].data)
    assert writer.commit([reserved.reservation_id])[0].stored
    finish(tier, store)
    assert store.report().tiers[0].blocks == 10
    held = sum(p.lstat().st_blocks * 512 for p in [tmp_path, *tmp_path.rglob("*")])
    assert store.report().tiers[0].used_bytes == held
    store.close()


def test_the_newest_files_are_read_first_and_the_oldest_evicted_first(tmp_path: Path) -> None:
    bench = Bench(tiers=[(FsTier(TierKind.LOCAL, tmp_path), BUDGET)])
    made = [bench.put([token])[0] for token in range(6)]
    for age, block in enumerate(made):
        (path,) = tmp_path.rglob(f"{block.key.hex()}.kvb")
        os.utime(path, (1000 - 100 * age, 1000 - 100 * age))
    bench.store.close()
    bench.tiers = [(FsTier(TierKind.LOCAL, tmp_path), BUDGET)]
    bench.open()
    assert list(bench.state.levels[0].lru) == [block.key for block in reversed(made)]
    bench.store.close()


@pytest.mark.parametrize("ttl_seconds", [10_000.0, 0.0])
def test_a_block_written_long_ago_outlives_the_loss_of_the_index(
    tmp_path: Path, ttl_seconds: float
) -> None:
    """It may have been used yesterday; the file does not say."""
    tiers: list[tuple[Tier, int]] = [(FsTier(TierKind.LOCAL, tmp_path), BUDGET)]
    bench = Bench(tiers=tiers, policy=StorePolicy(ttl_seconds=ttl_seconds))
    (made,) = bench.put([7])
    (path,) = tmp_path.rglob("*.kvb")
    os.utime(path, (1.0, 1.0))
    bench.store.close()
    bench.now = 1e9
    bench.tiers = [(FsTier(TierKind.LOCAL, tmp_path), BUDGET)]
    bench.open()
    record = bench.state.tree.get(made.key)
    assert record is not None
    assert record.last_use == 1e9 - ttl_seconds / 2
    bench.tick(START_SECONDS + 60)
    bench.store.run_pending()
    assert bench.in_tier(0) == {made.key}
    if ttl_seconds:  # and it does go when nobody uses it
        bench.tick(ttl_seconds / 2)
        bench.store.run_pending()  # a jump of the clock, here
        bench.tick(3600)
        bench.store.run_pending()
        assert bench.in_tier(0) == set()
    bench.store.close()


def test_a_scan_that_fails_is_repeated(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, blocks: list[samples.SampleBlock]
) -> None:
    monkeypatch.setattr("ollama_tiering.store.upkeep.survey._RETRY_SECONDS", 0.01)
    failures = [OSError(5, "input/output error"), OSError(116, "stale file handle")]
    scan = SlowTier.scan

    def failing(self: SlowTier) -> Iterator[StoredBlock]:
        if failures:
            raise failures.pop()
        return scan(self)

    monkeypatch.setattr(SlowTier, "scan", failing)
    tier, store = open_slowly(tmp_path, monkeypatch)
    finish(tier, store)
    assert rows(store, range(40)) == 40
    assert store.report().tiers[0].stats.failures == {"EIO": 1, "ESTALE": 1}
    assert keys_of(blocks) == set(store._state.levels[0].lru)
    store.close()


def test_a_close_does_not_wait_for_the_survey(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, blocks: list[samples.SampleBlock]
) -> None:
    tier, store = open_slowly(tmp_path, monkeypatch)
    thread = store._background.survey_thread
    store.close(drain_seconds=0.05)
    tier.may_scan.set()
    tier.may_read.set()
    assert thread is not None
    thread.join(30)
    again = Bench(tiers=[(FsTier(TierKind.LOCAL, tmp_path), BUDGET)], index_path=index(tmp_path))
    assert again.rows(range(40)) == 40
    again.store.close()


@pytest.mark.parametrize(
    "change",
    [
        "key = zeroblob(31) WHERE rowid_of",
        "namespace = 'text' WHERE rowid_of",
        "parent = 5 WHERE rowid_of",
        "tokens = zeroblob(7) WHERE rowid_of",
        "tokens = 12 WHERE rowid_of",
        "plain_rows = 1000 WHERE rowid_of",
        "plain_rows = -1 WHERE rowid_of",
        "stored_bytes = 'many' WHERE rowid_of",
        "file_bytes = -4096 WHERE rowid_of",
        "last_use = 'yesterday' WHERE rowid_of",
        "hits = 1.5 WHERE rowid_of",
    ],
)
def test_a_row_that_cannot_be_is_read_from_its_file_again(
    tmp_path: Path, blocks: list[samples.SampleBlock], change: str
) -> None:
    which = f"key = x'{blocks[4].key.hex()}'"
    with contextlib.closing(sqlite3.connect(index(tmp_path))) as connection, connection:
        statement = f"UPDATE blocks SET {change.replace('rowid_of', which)}"
        try:
            assert connection.execute(statement).rowcount == 1
        except sqlite3.IntegrityError:
            pytest.skip("the database refuses such a value itself")
    bench = Bench(tiers=[(FsTier(TierKind.LOCAL, tmp_path), BUDGET)], index_path=index(tmp_path))
    assert bench.rows(range(40)) == 40
    assert bench.in_tier(0) == keys_of(blocks)
    bench.store.close()


def test_what_was_only_in_ram_is_queued_again_after_a_start(tmp_path: Path) -> None:
    for policy, queued in ((StorePolicy(), 3), (StorePolicy(admission="second-touch"), 0)):
        bench = Bench(policy=policy)
        bench.put(range(12))
        bench.open()
        assert len(bench.state.unsaved) == queued


def test_before_its_files_are_counted_a_tier_takes_nothing_and_not_less(tmp_path: Path) -> None:
    tier = FsTier(TierKind.LOCAL, tmp_path / "local")
    index_path = tmp_path / "local" / "index.sqlite"
    store = TieredStore([(tier, 1 << 30)], index_path=index_path, background=False, measure=False)
    level = store.state.levels[0]
    assert level.headroom_bytes
    level.lru.overhead_bytes = 0  # as while a thread still counts
    assert store.report().tiers[0].used_bytes == 0
    store.close()


def test_a_commit_that_the_survey_was_faster_than_counts_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The file has its name before the commit holds the lock: the survey may read it in between."""
    bench = Bench(tiers=[(FsTier(TierKind.LOCAL, tmp_path), BUDGET)])
    add_copy = StoreState.add_copy

    def after_the_survey(
        self: StoreState, record: BlockRecord, level: Level, stored_bytes: int
    ) -> BlockRecord:
        add_copy(self, dataclasses.replace(record), level, stored_bytes, oldest=True)
        return add_copy(self, record, level, stored_bytes)

    monkeypatch.setattr(StoreState, "add_copy", after_the_survey)
    (made, *_) = bench.put([7])
    assert [record.key for record in bench.state.tree] == [made.key]
    assert bench.rows([7]) == 1
    assert bench.store.report().tiers[0].blocks == 1
    bench.store.close()
