"""A budget changed while the store runs: evicted down to, as soon as what holds a block lets go."""

from __future__ import annotations

import pytest

from measure.store import samples
from ollama_tiering.store.books.lru import ByteLru
from ollama_tiering.store.books.policy import StorePolicy
from ollama_tiering.store.serving.session import Outcome
from ollama_tiering.store.tiers.contract import TierKind
from ollama_tiering.store.upkeep import making_room, unlinking
from tests.unit.store.support import FILE_BYTES, NAMESPACE, NS, Bench, keys_of


def excess(bench: Bench) -> list[int]:
    return [level.lru.excess_bytes for level in bench.state.levels]


def test_a_lower_budget_evicts_the_least_recently_used_down_to_it() -> None:
    bench = Bench(ram=None, local=8)
    one, two, three = (bench.put([i])[0] for i in range(3))
    assert bench.rows([0]) == 1
    assert bench.store.set_budget(TierKind.LOCAL, 2 * FILE_BYTES) == 0
    assert bench.in_tier(0) == {one.key, three.key}
    tier = bench.tiers[0][0]
    assert {key for _, key in tier.blocks} == {one.key, three.key}  # type: ignore[attr-defined]
    assert bench.rows([1]) == 0
    report = bench.store.report().tiers[0]
    assert (report.budget_bytes, report.used_bytes) == (2 * FILE_BYTES, 2 * FILE_BYTES)
    assert two.key not in bench.in_tier(0)


def test_a_lower_budget_leaves_no_hole_in_a_chain() -> None:
    bench = Bench(ram=None, local=8)
    chain = bench.put(range(20))
    bench.store.set_budget(TierKind.LOCAL, 3 * FILE_BYTES)
    assert bench.in_tier(0) == keys_of(chain[:3])
    assert bench.rows(range(20)) == 12


def test_children_in_ram_only_do_not_keep_a_disk_over_its_budget() -> None:
    """They go too: a chain is held whole from any tier down, and RAM is lost at a reboot."""
    bench = Bench(ram=8, local=8, policy=StorePolicy(admission="second-touch"))
    chain = bench.put(range(20))
    other = bench.put([50])
    bench.rows(range(12))  # the first three are worth the disk now
    bench.store.run_pending()
    assert bench.in_tier(1) == keys_of(chain[:3])
    with bench.state.lock:
        for block in chain[:3]:  # and RAM gives them up for something else
            bench.state.forget_copy(bench.state.levels[0], block.key)
    bench.store.set_budget(TierKind.LOCAL, 2 * FILE_BYTES)
    bench.store.run_pending()
    assert excess(bench) == [0, 0]
    assert bench.in_tier(0) | bench.in_tier(1) == keys_of(chain[:2]) | keys_of(other)
    assert bench.rows(range(20)) == 8


def test_children_on_disk_only_do_not_keep_ram_over_its_budget() -> None:
    """The day's writes are used up by what went to the disk directly: the blocks before it cannot
    follow, and cannot leave RAM without it.
    """
    bench = Bench(ram=2, local=4, policy=StorePolicy(daily_write_bytes=4 * FILE_BYTES))
    chain = bench.put(range(24))
    assert (bench.in_tier(0), bench.in_tier(1)) == (keys_of(chain[:2]), keys_of(chain[2:]))
    bench.store.run_pending()
    assert bench.in_tier(0) == keys_of(chain[:2]), "all of it is worth having while there is room"
    bench.store.set_budget(TierKind.RAM, FILE_BYTES)
    bench.store.run_pending()
    assert excess(bench) == [0, 0]
    assert bench.in_tier(0) | bench.in_tier(1) <= keys_of(chain[:1])


def test_what_can_be_written_down_costs_no_child_on_disk_when_ram_shrinks() -> None:
    bench = Bench(ram=2, local=8)
    chain = bench.put(range(24))
    assert bench.in_tier(1) == keys_of(chain[2:])
    bench.store.set_budget(TierKind.RAM, FILE_BYTES)
    assert bench.in_tier(1) == keys_of(chain[2:]), "the two wait to be written down"
    bench.store.run_pending()
    assert excess(bench) == [0, 0]
    assert bench.in_tier(1) == keys_of(chain)


def test_a_higher_budget_takes_more_at_once() -> None:
    bench = Bench(ram=None, local=1)
    bench.put([1])
    bench.store.set_budget(TierKind.LOCAL, 3 * FILE_BYTES)
    bench.put([2])
    bench.put([3])
    assert [bench.rows([i]) for i in (1, 2, 3)] == [1, 1, 1]


def test_leased_blocks_go_when_their_lease_ends() -> None:
    bench = Bench(ram=None, local=4)
    lease = bench.lease(bench.put(range(12)))
    assert bench.store.set_budget(TierKind.LOCAL, FILE_BYTES) == 2 * FILE_BYTES
    bench.store.run_pending()
    assert excess(bench) == [2 * FILE_BYTES]
    bench.store.release(lease)
    bench.store.run_pending()
    assert excess(bench) == [0]
    assert bench.rows(range(12)) == 4


def test_a_reservation_keeps_its_room_and_then_counts() -> None:
    bench = Bench(ram=None, local=2)
    (block,) = samples.sequence(NS, [1])
    (reserved,) = bench.reserve([block])
    bench.put([2])
    assert bench.store.set_budget(TierKind.LOCAL, FILE_BYTES) == 0
    bench.fill(reserved, block.data)
    assert [r.stored for r in bench.session.commit([reserved.reservation_id])] == [True]
    bench.store.run_pending()
    assert bench.in_tier(0) == {block.key}


def test_ram_is_written_down_before_it_is_evicted() -> None:
    bench = Bench(ram=8, local=16)
    blocks = bench.put(range(16))
    assert bench.store.set_budget(TierKind.RAM, FILE_BYTES) == 3 * FILE_BYTES
    bench.store.run_pending()
    assert excess(bench) == [0, 0]
    assert bench.in_tier(1) == keys_of(blocks)
    assert bench.rows(range(16)) == 16


def test_nothing_is_reserved_above_the_new_budget() -> None:
    bench = Bench(ram=None, local=4)
    lease = bench.lease(bench.put(range(16)))
    bench.store.set_budget(TierKind.LOCAL, 2 * FILE_BYTES)
    (answer,) = bench.reserve(samples.sequence(NS, [77]))
    assert answer.outcome is Outcome.NO_ROOM
    bench.store.release(lease)


def test_damaged_blocks_kept_for_a_person_go_before_the_budget_is_broken() -> None:
    bench = Bench(ram=None, local=4)
    (block,) = bench.put([1])
    bench.damage(0, block.key)
    assert bench.store.report_corrupt(NAMESPACE, block.key)
    assert bench.store.report().tiers[0].overhead_bytes == FILE_BYTES
    lease = bench.lease(bench.put([2]))
    assert bench.store.set_budget(TierKind.LOCAL, FILE_BYTES) == 0
    assert bench.store.report().tiers[0].overhead_bytes == 0
    bench.store.release(lease)


@pytest.mark.parametrize(("kind", "budget"), [(TierKind.REMOTE, 1 << 30), (TierKind.LOCAL, 0)])
def test_tiers_do_not_come_and_go(kind: TierKind, budget: int) -> None:
    bench = Bench(ram=None, local=4)
    bench.put([1])
    with pytest.raises(ValueError, match=kind.label):
        bench.store.set_budget(kind, budget)
    assert bench.rows([1]) == 1


def test_watermarks_take_effect_on_the_next_step() -> None:
    bench = Bench(ram=10, local=100, high_watermark=0.95, low_watermark=0.9)
    bench.put(range(4 * 9))
    bench.store.run_pending()
    assert len(bench.in_tier(0)) == 9
    bench.store.set_watermarks(0.8, 0.3)
    bench.store.run_pending()
    assert len(bench.in_tier(0)) == 3
    assert bench.rows(range(4 * 9)) == 36


def test_a_leases_age_is_that_of_the_oldest() -> None:
    bench = Bench()
    blocks = bench.put([1])
    assert bench.store.report().oldest_lease_seconds == 0
    first = bench.lease(blocks)
    bench.tick(5)
    second = bench.lease(blocks)
    bench.tick(7)
    assert bench.store.report().oldest_lease_seconds == 12
    bench.store.release(first)
    assert bench.store.report().oldest_lease_seconds == 7
    bench.store.release(second)
    assert bench.store.report().oldest_lease_seconds == 0


def test_a_report_does_not_change_afterwards() -> None:
    bench = Bench()
    bench.put([1])
    before = bench.store.report()
    bench.rows([9])
    bench.store.run_pending()
    after = bench.store.report()
    assert before.counters.misses == {}
    assert after.counters.misses == {"unknown prefix": 1}
    assert before.tiers[1].stats.written_bytes == 0
    assert after.tiers[1].stats.written_bytes == FILE_BYTES


def test_bytes_and_seconds_are_counted_by_tier_and_direction() -> None:
    bench = Bench()
    blocks = bench.put(range(8))
    bench.store.run_pending()
    bench.store.release(bench.lease(blocks))
    ram, local = (tier.stats for tier in bench.store.report().tiers)
    assert (ram.written_bytes, local.written_bytes) == (2 * FILE_BYTES, 2 * FILE_BYTES)
    assert (ram.read_bytes, local.read_bytes) == (2 * FILE_BYTES, 0)
    assert ram.write_seconds > 0
    assert ram.read_seconds > 0
    assert local.write_seconds > 0
    assert local.read_seconds == 0
    assert (ram.served_blocks, ram.served_bytes) == (2, 2 * FILE_BYTES)
    assert (local.served_blocks, local.served_bytes) == (0, 0)


def test_hits_are_lookups_that_found_something() -> None:
    bench = Bench()
    bench.put([1, 2])
    assert bench.rows([1, 3]) == 1
    assert bench.rows([7]) == 0
    counters = bench.store.report().counters
    assert (counters.has_calls, counters.hits) == (2, 1)


def test_an_lru_over_its_budget_says_by_how_much() -> None:
    lru: ByteLru[str] = ByteLru(10)
    lru.add("a", 8)
    lru.budget_bytes = 5
    assert lru.excess_bytes == 3


def test_two_threads_do_not_evict_twice_for_one_excess() -> None:
    bench = Bench(ram=None, local=8)
    blocks = bench.put(range(32))
    level = bench.state.levels[0]
    level.lru.budget_bytes = 4 * FILE_BYTES
    with bench.state.lock:  # another thread has begun and not yet unlinked
        taken = bench.state.take_victims(level, level.lru.excess_bytes)
    assert not making_room.shrink(bench.state, level)
    unlinking.unlink(bench.state, taken)
    assert excess(bench) == [0]
    assert bench.in_tier(0) == keys_of(blocks[:4])
    assert level.leaving_bytes == 0
