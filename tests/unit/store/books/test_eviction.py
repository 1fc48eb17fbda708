"""What stays: parents before children, hits before what was only written, leases, holds, age."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import pytest

from measure.store import samples
from ollama_tiering.store.block.key import BlockKey
from ollama_tiering.store.books.policy import StorePolicy
from ollama_tiering.store.serving.session import WriteSession
from ollama_tiering.store.tiers.contract import TierKind
from ollama_tiering.store.tiers.memory import MemoryTier
from ollama_tiering.store.upkeep import unlinking
from ollama_tiering.store.upkeep.expiry import JUMP_SECONDS, START_SECONDS
from tests.unit.store.support import BLOCK_TOKENS, FILE_BYTES, NAMESPACE, NS, Bench, keys_of


def closed(bench: Bench) -> bool:
    """From every tier down, whole chains."""
    tree = bench.state.tree
    for record in tree:
        if record.parent == NAMESPACE:
            continue
        parent = tree.get(BlockKey(record.parent))
        if parent is None or max(parent.levels) < max(record.levels):
            return False
    return True


def test_a_prefix_that_was_asked_for_outlives_newer_one_offs() -> None:
    bench = Bench(ram=None, local=6)
    prefix = bench.put(range(8))
    bench.rows([*range(8), 90])
    for token in range(100, 120):
        bench.put([token])
    assert keys_of(prefix) <= bench.in_tier(0)
    assert bench.rows(range(8)) == 8


def test_what_was_hot_once_does_not_stay_for_ever() -> None:
    bench = Bench(ram=None, local=10)
    old = bench.put(range(32))
    bench.rows(range(32))
    for number in range(6):
        tokens = range(100 * (number + 1), 100 * (number + 1) + 8)
        bench.put(tokens)
        bench.rows(tokens)
    assert not keys_of(old) & bench.in_tier(0)


def test_writing_a_conversation_again_is_no_hit() -> None:
    bench = Bench(ram=None, local=4)
    bench.put(range(4))
    bench.put(range(8))  # touches the first block
    assert all(record.hits == 0 for record in bench.state.tree)


def test_a_few_rows_in_common_are_no_hit() -> None:
    bench = Bench()
    (block,) = bench.put([1, 2, 3, 4])
    assert bench.rows([1, 9, 9, 9]) == 1
    assert bench.state.tree.get(block.key).hits == 0  # type: ignore[union-attr]
    assert bench.rows([1, 2, 9, 9]) == 2
    assert bench.state.tree.get(block.key).hits == 1  # type: ignore[union-attr]


def test_hits_survive_a_restart(tmp_path: Path) -> None:
    bench = Bench(ram=None, local=6, index_path=tmp_path / "index.sqlite")
    prefix = bench.put(range(8))
    bench.rows([*range(8), 90])
    bench.store.close()
    bench.open()
    for token in range(100, 120):
        bench.put([token])
    assert keys_of(prefix) <= bench.in_tier(0)


def test_a_child_goes_down_after_its_parent(monkeypatch: pytest.MonkeyPatch) -> None:
    bench = Bench(ram=8, local=8)
    first, second, third = bench.put(range(12))
    bench.state.unsaved.defer(first.key)
    bench.state.unsaved.defer(second.key)
    assert next(iter(bench.state.unsaved)) == third.key
    named: list[BlockKey] = []
    publish = MemoryTier.publish

    def watched(tier: MemoryTier, temp: Any, *, durable: bool = True) -> int:
        named.append(temp.key)
        return publish(tier, temp, durable=durable)

    monkeypatch.setattr(MemoryTier, "publish", watched)
    bench.store.run_pending()
    assert named == [first.key, second.key, third.key]
    assert closed(bench)


def test_a_block_that_cannot_go_down_holds_up_what_hangs_on_it() -> None:
    bench = Bench(ram=8, local=8)
    blocks = bench.put(range(16))
    tier = bench.tiers[0][0]
    assert isinstance(tier, MemoryTier)
    content = bytearray(tier.blocks[NAMESPACE, blocks[1].key])
    content[4096] ^= 1
    tier.blocks[NAMESPACE, blocks[1].key] = bytes(content)
    bench.store._mover.step()  # four at once: only what is before the damaged one may stay
    assert bench.in_tier(1) == {blocks[0].key}
    assert not tier.writing
    local = bench.tiers[1][0]
    assert isinstance(local, MemoryTier)
    assert not local.writing
    assert bench.store.report().tiers[1].reserved_bytes == 0


def test_a_parent_whose_copy_in_ram_is_safe_keeps_the_lower_one_for_its_children() -> None:
    bench = Bench(ram=8, local=3, high_watermark=1.0, low_watermark=0.99)
    chain = bench.put(range(12))
    bench.store.run_pending()
    for block in chain[1:]:
        bench.state.forget_copy(bench.state.levels[0], block.key)
    assert closed(bench)
    bench.put([50])
    bench.store.run_pending()
    assert closed(bench)
    assert chain[0].key in bench.in_tier(1)


@pytest.mark.parametrize("seed", range(5))
def test_three_levels_hold_whole_chains_from_any_one_down(seed: int) -> None:
    rng = random.Random(seed)
    kinds = (TierKind.RAM, TierKind.LOCAL, TierKind.REMOTE)
    tiers = [(MemoryTier(kind), n * FILE_BYTES) for kind, n in zip(kinds, (6, 9, 14), strict=True)]
    bench = Bench(tiers=list(tiers), high_watermark=0.9, low_watermark=0.5)
    for _ in range(150):
        tokens = [rng.randrange(2) for _ in range(rng.randrange(1, 24))]
        bench.try_put(samples.sequence(NS, tokens))
        bench.tick()
        matched = bench.match([rng.randrange(2) for _ in range(12)])
        lease = bench.store.lease(NAMESPACE, [block.key for block in matched])
        for _ in range(rng.randrange(8)):
            bench.store._mover.step()
        bench.store.release(lease.lease_id)
        bench.store.run_pending()
        assert closed(bench)
        for level in bench.state.levels:
            assert level.lru.counted_bytes <= level.lru.budget_bytes


def test_a_parent_is_not_unlinked_before_a_child_that_another_thread_is_at() -> None:
    bench = Bench(ram=None, local=3)
    first, second, third = bench.put(range(12))
    state, level = bench.state, bench.state.levels[0]
    taken = state.take_victims(level, FILE_BYTES)
    assert [one.key for one in taken] == [third.key]
    assert state.take_victims(level, FILE_BYTES) == []
    unlinking.unlink(state, taken)
    assert [one.key for one in state.take_victims(level, 2 * FILE_BYTES)] == [second.key, first.key]
    assert state.leaving_children != {}


def test_what_a_person_pinned_is_not_evicted() -> None:
    bench = Bench(ram=None, local=2)
    held = bench.put([1])
    bench.store.pins.pin(BlockKey(held[0].key))
    for token in range(10, 20):
        bench.put([token])
    assert keys_of(held) <= bench.in_tier(0)


# --- two writers of one chain -------------------------------------------------------------------


def two_writers(bench: Bench) -> tuple[WriteSession, int, int]:
    """One reserved the first block, another the second: the other one, ids of both reservations."""
    first, second = samples.sequence(NS, range(8))
    (one,) = bench.session.reserve([first.offer])
    other = bench.store.open_session(NAMESPACE, NS.fields(), BLOCK_TOKENS)
    present, two = other.reserve([first.offer, second.offer])
    assert not present.reservation_id
    bench.fill(one, first.data)
    other._pending[two.reservation_id].temp.write_at(0, second.data)
    return other, one.reservation_id, two.reservation_id


def test_a_child_committed_first_stays_when_its_parent_follows() -> None:
    bench = Bench()
    other, one, two = two_writers(bench)
    assert other.commit([two])[0].stored
    assert bench.session.commit([one])[0].stored
    assert bench.in_tier(0) == keys_of(samples.sequence(NS, range(8)))
    assert bench.rows(range(8)) == 8


@pytest.mark.parametrize("end", ["close", "expire", "damage"])
def test_a_child_committed_first_goes_when_its_parent_fails(end: str) -> None:
    bench = Bench()
    other, one, two = two_writers(bench)
    assert other.commit([two])[0].stored
    if end == "close":
        bench.session.close()
    elif end == "expire":
        bench.session.release_expired(bench.now + 1000)
    else:
        bench.session._pending[one].temp.write_at(0, bytes(100))
        assert not bench.session.commit([one])[0].stored
    assert bench.in_tier(0) == set()
    assert len(bench.state.tree) == 0
    assert bench.store.report().tiers[0].used_bytes == 0
    bench.put(range(8))
    assert bench.rows(range(8)) == 8


def test_a_child_in_use_when_its_parent_fails_goes_afterwards() -> None:
    bench = Bench()
    other, _, two = two_writers(bench)
    assert other.commit([two])[0].stored
    child = samples.sequence(NS, range(8))[1]
    lease = bench.lease([child])
    bench.session.close()
    bench.store.run_pending()
    assert child.key in bench.in_tier(0)
    bench.store.release(lease)
    bench.store.run_pending()
    assert bench.in_tier(0) == bench.in_tier(1) == set()
    assert bench.state.early == {}


def test_a_child_whose_parent_has_failed_already_is_not_stored() -> None:
    bench = Bench()
    other, _, two = two_writers(bench)
    bench.session.close()
    (result,) = other.commit([two])
    assert not result.stored
    assert "before it" in result.reason
    assert bench.in_tier(0) == set()
    assert bench.store.report().tiers[0].reserved_bytes == 0


def test_after_a_crash_between_two_writers_the_child_goes_first_and_is_not_written_down() -> None:
    bench = Bench(ram=4, local=8)
    other, _, two = two_writers(bench)
    assert other.commit([two])[0].stored
    orphan = samples.sequence(NS, range(8))[1].key
    kept = bench.put([50])
    bench.open()  # the file of the parent was never finished
    assert next(iter(bench.state.levels[0].lru)) == orphan
    bench.store.run_pending()
    assert bench.in_tier(1) == keys_of(kept)
    bench.put(range(4))  # the parent again: so the child can be reached
    assert bench.rows(range(8)) == 8
    bench.store.run_pending()
    assert orphan in bench.in_tier(1)
    assert closed(bench)


def test_an_orphan_is_the_first_to_be_evicted() -> None:
    bench = Bench(ram=None, local=3)
    chain = bench.put(range(12))
    bench.rows(range(12))
    bench.tiers[0][0].remove(NAMESPACE, chain[0].key)
    bench.open()
    assert bench.rows(range(12)) == 0
    bench.put([50])
    bench.put([51])
    assert bench.in_tier(0) == {chain[1].key} | keys_of(samples.sequence(NS, [50])) | keys_of(
        samples.sequence(NS, [51])
    )


# --- age ----------------------------------------------------------------------------------------


def aged(bench: Bench, seconds: float) -> None:
    """Time passes in steps, as it does."""
    for _ in range(100):
        bench.tick(seconds / 100)
        bench.store.run_pending()


def test_what_nobody_used_for_so_long_is_dropped() -> None:
    bench = Bench(policy=StorePolicy(ttl_seconds=10_000))
    bench.put(range(12))
    kept = bench.put([50])
    aged(bench, 9_000)
    assert bench.rows([50]) == 1
    aged(bench, 2_000)
    assert bench.in_tier(0) == bench.in_tier(1) == keys_of(kept)
    report = bench.store.report()
    assert [tier.stats.expired_blocks for tier in report.tiers] == [3, 3]


def test_a_leased_block_does_not_expire() -> None:
    bench = Bench(policy=StorePolicy(ttl_seconds=1_000), lease_seconds=100_000)
    blocks = bench.put(range(8))
    bench.lease(blocks)
    aged(bench, 5_000)
    assert bench.in_tier(0) == keys_of(blocks)


def test_a_clock_that_jumps_ahead_expires_nothing_for_a_while() -> None:
    bench = Bench(policy=StorePolicy(ttl_seconds=10_000))
    wall = [0.0]
    bench.state.wall_clock = lambda: bench.now + wall[0]
    bench.store._mover._expiry._wall_clock = bench.state.wall_clock
    blocks = bench.put(range(8))
    aged(bench, START_SECONDS + 100)
    wall[0] = 1e9
    aged(bench, JUMP_SECONDS - 100)
    assert bench.in_tier(0) == keys_of(blocks)
    wall[0] = 0  # set right again
    aged(bench, 5_000)
    assert bench.in_tier(0) == keys_of(blocks)


def test_nothing_expires_right_after_a_start() -> None:
    bench = Bench(policy=StorePolicy(ttl_seconds=1))
    blocks = bench.put(range(8))
    aged(bench, START_SECONDS - 100)
    assert bench.in_tier(0) == keys_of(blocks)
