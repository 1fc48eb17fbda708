"""Three tiers: demotion to a shared one, staging from it, and what two stores on it see."""

from __future__ import annotations

import errno
import os
import threading
import time
from collections.abc import Iterator
from contextlib import AbstractContextManager
from pathlib import Path

import pytest

from measure.store import samples
from ollama_tiering.store.block.key import BlockKey, NamespaceId
from ollama_tiering.store.tiers.contract import OpenBlock, TierKind
from ollama_tiering.store.tiers.remote import RemoteTier
from tests.contract.faulty import Faults, remote_tier
from tests.unit.store.remote_bench import RemoteBench, demoted, files
from tests.unit.store.support import FILE_BYTES, NAMESPACE, NS, keys_of


@pytest.fixture
def directory(tmp_path: Path) -> Path:
    return tmp_path / "remote"


@pytest.fixture
def benches() -> Iterator[list[RemoteBench]]:
    """Closed at the end."""
    opened: list[RemoteBench] = []
    yield opened
    for bench in opened:
        bench.faults.heal()
        bench.store.close(drain_seconds=0)


@pytest.fixture
def bench(directory: Path, benches: list[RemoteBench]) -> RemoteBench:
    benches.append(RemoteBench(directory))
    return benches[0]


# --- three levels -------------------------------------------------------------------------------


def test_nothing_goes_to_the_remote_tier_while_the_local_one_has_room(bench: RemoteBench) -> None:
    blocks = bench.put(range(4 * 6))
    bench.store.run_pending()
    assert bench.in_tier(1) == keys_of(blocks)
    assert bench.in_tier(2) == set()


def test_a_full_local_tier_demotes_its_oldest_down_to_the_low_watermark(
    bench: RemoteBench, directory: Path
) -> None:
    first = bench.put(range(4 * 6))
    bench.store.run_pending()
    second = bench.put(range(100, 100 + 4 * 2))
    bench.store.run_pending()
    local, remote = bench.in_tier(1), bench.in_tier(2)
    assert len(local) == 6  # low watermark: 0.85 of 8
    assert remote == files(directory) <= keys_of(first)
    assert local | remote == keys_of(first) | keys_of(second)
    assert bench.rows(range(4 * 6)) == 24
    assert bench.store.report().tiers[1].stats.demoted_blocks == 2
    assert bench.store.report().tiers[1].stats.evicted_blocks == 0


def test_ram_above_the_remote_tier_writes_down_to_it(
    directory: Path, benches: list[RemoteBench]
) -> None:
    bench = RemoteBench(directory, local=None)
    benches.append(bench)
    blocks = bench.put(range(4 * 5))
    bench.store.run_pending()
    assert bench.in_tier(1) == files(directory) == keys_of(blocks)
    assert not bench.state.unsaved


def test_the_remote_tier_drops_its_oldest(directory: Path, benches: list[RemoteBench]) -> None:
    bench = RemoteBench(directory, ram=8, local=None, remote=4)
    benches.append(bench)
    for token in range(12):
        bench.put([token])
        bench.tick(10)
        bench.store.run_pending()
        bench.tick(10)
        bench.store.run_pending()
        assert len(files(directory)) <= 4
    newest = samples.sequence(NS, [11])
    assert keys_of(newest) <= files(directory)
    assert bench.store.report().tiers[1].stats.evicted_blocks >= 8 - 4


def test_a_block_that_is_remote_only_is_staged_into_ram(bench: RemoteBench) -> None:
    blocks = demoted(bench, range(4 * 3 + 2))
    found = bench.match(range(4 * 3 + 2))
    assert [block.tier for block in found] == [TierKind.REMOTE] * 4
    assert sum(block.rows for block in found) == 14
    leased = bench.store.lease(NAMESPACE, [block.key for block in blocks])
    assert [block.tier for block in leased.blocks] == [TierKind.RAM] * 4
    for held, block in zip(leased.blocks, blocks, strict=True):
        assert bench.store.read_part(held, 0, held.file_bytes) == block.data
    assert bench.in_tier(0) == keys_of(blocks)
    assert bench.store.report().tiers[0].stats.promoted_blocks == 4


def test_a_block_is_staged_into_the_local_tier_where_ram_is_taken(bench: RemoteBench) -> None:
    blocks = demoted(bench, range(8))
    bench.lease(bench.put(range(100, 100 + 4 * 8)))  # pins all of RAM
    leased = bench.store.lease(NAMESPACE, [block.key for block in blocks])
    assert [block.tier for block in leased.blocks] == [TierKind.LOCAL] * 2


def test_what_has_no_room_to_be_staged_ends_the_run(
    directory: Path, benches: list[RemoteBench]
) -> None:
    bench = RemoteBench(directory, ram=3, local=None)
    benches.append(bench)
    blocks = demoted(bench, range(8))
    bench.lease(bench.put(range(100, 108)))
    leased = bench.store.lease(NAMESPACE, [block.key for block in blocks])
    assert len(leased.blocks) == 1
    assert bench.store.report().counters.misses["not staged"] == 1
    assert not bench.store.report().tiers[1].suspended


def test_a_damaged_remote_block_is_a_miss_and_quarantined(
    bench: RemoteBench, directory: Path
) -> None:
    blocks = demoted(bench, range(8))
    path = next(path for path in directory.rglob("*.kvb") if path.stem == blocks[1].key.hex())
    path.chmod(0o600)
    content = bytearray(path.read_bytes())
    content[-1] ^= 0
    content[4096] ^= 1
    path.write_bytes(content)
    leased = bench.store.lease(NAMESPACE, [block.key for block in blocks])
    assert [block.key for block in leased.blocks] == [blocks[0].key]
    assert bench.rows(range(8)) == 4
    assert path.with_name(path.name + ".bad").exists()


def test_no_client_is_ever_given_a_path_on_the_remote_tier(directory: Path) -> None:
    tier = remote_tier(directory, Faults())
    temp = tier.create(NAMESPACE, samples.sequence(NS, [1])[0].key, 8192)
    assert temp.path is None
    assert tier.path(NAMESPACE, temp.key) is None
    tier.discard(temp)
    tier.close()


def test_expected_seconds_of_remote_blocks_follow_what_staging_took(bench: RemoteBench) -> None:
    blocks = demoted(bench, range(8))
    level = bench.state.levels[2]
    assert bench.match(range(8))[0].expected_seconds == pytest.approx(5e-4 + FILE_BYTES / 50e6)
    level.speed.read = 1e6
    (block, _) = bench.match(range(8))
    assert block.expected_seconds == pytest.approx(5e-4 + FILE_BYTES / 1e6)
    assert len(blocks) == 2


def test_a_staged_run_measures_the_remote_tier(
    directory: Path, benches: list[RemoteBench], monkeypatch: pytest.MonkeyPatch
) -> None:
    bench = RemoteBench(directory)
    benches.append(bench)
    blocks = demoted(bench, range(4 * 6))
    monkeypatch.setattr("ollama_tiering.store.books.speed._MIN_SAMPLE_BYTES", 1)
    start = time.perf_counter()
    leased = bench.store.lease(NAMESPACE, [block.key for block in blocks])
    took = time.perf_counter() - start
    assert len(leased.blocks) == 6
    # At least what the whole run gave; the last moving average may be of its fastest part.
    assert bench.state.levels[2].speed.read >= 0.3 * 6 * FILE_BYTES / took


def test_remote_blocks_are_known_again_after_a_restart(
    directory: Path, tmp_path: Path, benches: list[RemoteBench]
) -> None:
    bench = RemoteBench(directory, index_path=tmp_path / "index.sqlite")
    benches.append(bench)
    demoted(bench, range(4 * 3))
    bench.store.close()
    bench.tiers[2] = (remote_tier(directory, bench.faults), bench.tiers[2][1])
    bench.open()
    assert bench.rows(range(4 * 3)) == 0  # not looked at yet, and not waited for
    assert bench.store.report().tiers[2].state == "not looked at yet"
    bench.faults.calls.clear()
    bench.look()
    assert bench.rows(range(4 * 3)) == 12
    assert "open" not in bench.faults.calls  # the index spared reading headers
    assert bench.store.report().tiers[2].state == "ok"


def test_removing_a_sequence_removes_its_remote_blocks_later(
    bench: RemoteBench, directory: Path
) -> None:
    blocks = demoted(bench, range(8))
    bench.faults.calls.clear()
    assert bench.store.remove_seq(NAMESPACE, [block.key for block in blocks])[0] == 2
    assert bench.faults.calls == []  # the client's call touched nothing remote
    assert bench.rows(range(8)) == 0
    bench.store.run_pending()
    assert files(directory) == set()


def test_a_block_removed_and_stored_again_stays(bench: RemoteBench, directory: Path) -> None:
    blocks = demoted(bench, range(8))
    bench.store.remove_seq(NAMESPACE, [block.key for block in blocks])
    bench.put(range(8))
    bench.look()
    bench.store.run_pending()
    assert bench.rows(range(8)) == 8


# --- two sidecars -------------------------------------------------------------------------------


@pytest.fixture
def pair(directory: Path, benches: list[RemoteBench]) -> tuple[RemoteBench, RemoteBench]:
    benches += [RemoteBench(directory), RemoteBench(directory)]
    return benches[0], benches[1]


def test_one_sees_and_reads_what_the_other_stored(pair: tuple[RemoteBench, RemoteBench]) -> None:
    one, two = pair
    blocks = demoted(one, range(4 * 3))
    assert two.rows(range(4 * 3)) == 0
    two.look()
    assert two.rows(range(4 * 3)) == 12
    leased = two.store.lease(NAMESPACE, [block.key for block in blocks])
    assert len(leased.blocks) == 3
    assert two.store.read_part(leased.blocks[2], 0, FILE_BYTES) == blocks[2].data


def test_what_the_other_removed_is_a_miss_and_then_forgotten(
    pair: tuple[RemoteBench, RemoteBench],
) -> None:
    one, two = pair
    blocks = demoted(one, range(4 * 3))
    two.look()
    one.store.remove_seq(NAMESPACE, [block.key for block in blocks])
    one.store.run_pending()
    assert two.rows(range(4 * 3)) == 12  # as far as it knows
    assert two.store.lease(NAMESPACE, [block.key for block in blocks]).blocks == []
    assert not two.store.report().tiers[2].suspended
    two.look()
    assert two.rows(range(4 * 3)) == 0


def test_a_file_removed_while_it_is_read_is_read_on_or_a_miss(
    pair: tuple[RemoteBench, RemoteBench],
) -> None:
    one, two = pair
    (block,) = demoted(one, range(4))
    two.look()
    with two.tiers[2][0].open(NAMESPACE, block.key) as opened:
        one.store.remove_seq(NAMESPACE, [block.key])
        one.store.run_pending()
        assert opened.read_at(0, FILE_BYTES) == block.data
        two.faults.fail(116)  # ESTALE, as NFS says it
        with pytest.raises(FileNotFoundError):
            opened.read_at(0, FILE_BYTES)


def test_a_use_by_one_keeps_the_block_from_being_dropped_by_the_other(
    directory: Path, pair: tuple[RemoteBench, RemoteBench]
) -> None:
    one, two = pair
    old = demoted(one, range(4))
    new = demoted(one, range(100, 104))
    aged = time.time() - 7200
    for path in directory.rglob("*.kvb"):
        os.utime(path, (aged, aged + (60 if path.stem == new[0].key.hex() else 0)))
    one.open()
    for bench in pair:
        bench.now = time.time()
        bench.look()
    assert list(one.state.levels[2].lru) == [old[0].key, new[0].key]
    two.match(range(4))
    two.look()  # tells it
    one.look()  # hears it
    assert list(one.state.levels[2].lru) == [new[0].key, old[0].key]


def test_the_others_unfinished_writes_are_left_alone_and_counted(
    directory: Path, pair: tuple[RemoteBench, RemoteBench]
) -> None:
    one, two = pair
    (block,) = samples.sequence(NS, [1, 2])
    temp = one.tiers[2][0].create(NAMESPACE, block.key, FILE_BYTES)
    temp.write_at(0, block.data)
    two.look()
    assert two.store.report().tiers[2].used_bytes == FILE_BYTES
    one.tiers[2][0].publish(temp)
    two.look()
    assert two.rows([1, 2]) == 2
    assert two.store.report().tiers[2].used_bytes == FILE_BYTES


def test_two_never_write_more_than_the_budget_together(
    directory: Path, benches: list[RemoteBench]
) -> None:
    budget = 8
    pair = [RemoteBench(directory, ram=12, local=None, remote=budget) for _ in range(2)]
    benches += pair
    for step in range(60):
        bench = pair[step % 2]
        bench.put([step])
        bench.tick(10)
        bench.store.run_pending()
        used = sum(path.stat().st_blocks * 512 for path in directory.rglob("*.kvb"))
        assert used <= budget * FILE_BYTES, step
    for bench in pair:
        bench.look()
        assert bench.store.report().tiers[1].shared is not None
        assert bench.store.report().tiers[1].shared.neighbours == 1
    written = [bench.store.report().tiers[1].stats.written_bytes for bench in pair]
    assert all(count >= 8 * FILE_BYTES for count in written), written


def test_of_two_that_claim_at_once_one_withdraws(pair: tuple[RemoteBench, RemoteBench]) -> None:
    one, two = pair
    one.look()
    mover = one.store._remote
    assert mover is not None
    rescan, tier = mover._rescan, mover._tier
    announce = tier.announce

    def beaten(generation: int, claim_bytes: int) -> float:
        """The other one claims just before."""
        if claim_bytes:
            two.look()
        return announce(generation, claim_bytes)

    shared = one.state.levels[2].shared
    assert shared is not None
    shared.grant(0, one.now, one.now)
    tier.announce = beaten  # type: ignore[method-assign]
    rescan.run()
    assert shared.allowance_bytes == 0
    tier.announce = announce  # type: ignore[method-assign]
    rescan.run()
    assert shared.allowance_bytes > 0


def test_an_allowance_does_not_outlive_a_sleep(bench: RemoteBench) -> None:
    bench.look()
    shared = bench.state.levels[2].shared
    assert shared is not None
    lru = bench.state.levels[2].lru
    assert shared.reserve(lru, FILE_BYTES, bench.now, bench.now) is not None
    assert shared.reserve(lru, FILE_BYTES, bench.now, bench.now + 3600) is None


def test_ram_takes_new_blocks_while_the_remote_tier_takes_none(
    directory: Path, benches: list[RemoteBench]
) -> None:
    bench = RemoteBench(directory, ram=4, local=None)
    benches.append(bench)
    bench.faults.fail(5)
    for token in range(8):
        bench.put([token])
    bench.faults.heal()
    shared = bench.state.levels[1].shared
    assert shared is not None
    bench.tick(100)
    bench.look()
    shared.grant(0, bench.now, bench.now)
    for token in range(100, 108):
        bench.put([token])  # nothing rests, and nothing can be written down
    assert bench.rows([107]) == 1


def test_a_remote_tier_nobody_reads_from_is_measured_all_the_same(
    bench: RemoteBench, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("ollama_tiering.store.books.speed._MIN_SAMPLE_BYTES", 1)
    demoted(bench, range(8))
    assert bench.state.levels[2].speed.read == 0
    bench.tick(1000)
    bench.store.run_pending()
    assert bench.state.levels[2].speed.read > 0


def test_a_look_that_failed_is_made_again_soon(bench: RemoteBench) -> None:
    bench.faults.fail(5, "scan")
    bench.store.run_pending()
    assert bench.store.report().tiers[2].state == "resting"
    bench.faults.heal()
    bench.tick(3)
    bench.store.run_pending()  # back, but not at once looked at: what fails may be the look itself
    assert bench.store.report().tiers[2].state == "not looked at yet"
    bench.tick(4)
    bench.store.run_pending()
    assert bench.store.report().tiers[2].state == "ok"


def test_a_block_that_cannot_be_read_does_not_keep_the_tier_out(
    bench: RemoteBench, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One bad sector, and the other blocks can be read."""
    made = bench.put(range(4 * 4))
    bench.store.run_pending()
    bench.look()
    mover, level = bench.store._remote, bench.state.levels[bench.remote]
    assert mover is not None
    for block in made:
        record = bench.state.tree.get(block.key)
        assert record is not None
        assert mover.copy(record, bench.state.levels[bench.remote - 1], level)
    bad = next(iter(level.lru))
    peek = mover._tier.peek

    def broken(namespace: NamespaceId, key: BlockKey) -> AbstractContextManager[OpenBlock]:
        if key == bad:
            raise OSError(errno.EIO, os.strerror(errno.EIO))
        return peek(namespace, key)

    monkeypatch.setattr(mover._tier, "peek", broken)
    with bench.state.lock:
        bench.state.failed(level, OSError(errno.EIO, "away"))
    for _ in range(2):
        bench.tick(120)
        mover.recover()
    assert not bench.state.suspended(level)
    mover.measure()  # of a block that can be read
    assert not bench.state.suspended(level)


def test_while_one_of_two_removals_hangs_no_new_file_is_put_there(
    bench: RemoteBench, monkeypatch: pytest.MonkeyPatch
) -> None:
    tier = bench.state.levels[bench.remote].tier
    assert isinstance(tier, RemoteTier)
    (block,) = samples.sequence(NS, list(range(4)))
    hung, let_go = threading.Event(), threading.Event()

    def remove(namespace: NamespaceId, key: BlockKey) -> None:
        if not hung.is_set():
            hung.set()
            let_go.wait(30)

    monkeypatch.setattr(tier._opened(), "remove", remove)
    monkeypatch.setattr(tier._threads, "deadline_seconds", 0.5)
    with pytest.raises(TimeoutError):
        tier.remove(NAMESPACE, block.key)
    assert hung.is_set()
    monkeypatch.setattr(tier._threads, "deadline_seconds", 10.0)
    tier.remove(NAMESPACE, block.key)  # the retry returns, the first call does not
    temp = tier.create(NAMESPACE, block.key, len(block.data))
    temp.write_at(0, block.data)
    with pytest.raises(TimeoutError, match="would take the new file away"):
        tier.publish(temp)
    let_go.set()
    end = time.monotonic() + 10
    while tier.stalled and time.monotonic() < end:
        time.sleep(0.01)
    tier.publish(temp)
    assert tier.exists(NAMESPACE, block.key)
