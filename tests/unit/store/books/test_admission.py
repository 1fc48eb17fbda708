"""Which blocks reach the disk: policies, the queue's bound, minimum tokens, the day's budget."""

from __future__ import annotations

from pathlib import Path

import pytest

from measure.store import samples
from ollama_tiering.store.books.policy import StorePolicy
from ollama_tiering.store.serving.session import Outcome
from ollama_tiering.store.tiers.contract import TierKind
from ollama_tiering.store.tiers.directory import FsTier
from ollama_tiering.store.tiers.memory import MemoryTier
from tests.unit.store.support import FILE_BYTES, NS, Bench, keys_of


def bench_with(ram: int | None = 8, local: int = 32, **policy: object) -> Bench:
    return Bench(ram=ram, local=local, policy=StorePolicy(**policy))  # type: ignore[arg-type]


def test_on_second_touch_a_block_is_written_down_when_it_is_asked_for_again() -> None:
    bench = bench_with(admission="second-touch")
    blocks = bench.put(range(12))
    other = bench.put([50])
    bench.store.run_pending()
    assert bench.in_tier(1) == set()
    assert bench.rows(range(12)) == 12
    bench.store.run_pending()
    assert bench.in_tier(1) == keys_of(blocks)
    assert not keys_of(other) & bench.in_tier(1)


def test_on_second_touch_only_the_part_asked_for_is_written_down() -> None:
    bench = bench_with(admission="second-touch")
    blocks = bench.put(range(12))
    assert bench.rows([*range(8), 90]) == 8
    bench.store.run_pending()
    assert bench.in_tier(1) == keys_of(blocks[:2])


def test_under_second_touch_ram_forgets_what_nobody_asked_for() -> None:
    bench = bench_with(ram=3, admission="second-touch")
    for token in range(6):
        bench.put([token])
    assert len(bench.in_tier(0)) == 3
    bench.store.run_pending()
    assert bench.in_tier(1) == set()


def test_without_ram_second_touch_means_offered_twice() -> None:
    bench = bench_with(ram=None, admission="second-touch")
    block = samples.sequence(NS, [1, 2])
    assert bench.reserve(block)[0].outcome is Outcome.REFUSED
    assert bench.reserve(block)[0].outcome is Outcome.RESERVED
    assert bench.store.report().not_written == {"first touch": 1}


def test_after_a_refusal_the_rest_of_the_chain_is_refused_too() -> None:
    bench = bench_with(ram=None, admission="second-touch")
    outcomes = [answer.outcome for answer in bench.reserve(samples.sequence(NS, range(12)))]
    assert outcomes == [Outcome.REFUSED] * 3
    assert bench.store.report().not_written == {"first touch": 1}


def test_under_pressure_nothing_is_written_until_ram_must_evict() -> None:
    bench = bench_with(ram=10, admission="pressure")
    blocks = bench.put(range(4 * 9))
    bench.store.run_pending()
    assert bench.in_tier(1) == set()
    bench.put([100])
    bench.store.run_pending()
    assert bench.in_tier(1)
    assert bench.in_tier(1) <= keys_of(blocks)
    assert len(bench.in_tier(0)) < 10
    assert bench.rows(range(4 * 9)) == 36


def test_under_pressure_nothing_is_lost_while_the_disk_has_room() -> None:
    bench = bench_with(ram=10, local=100, admission="pressure")
    prompts = [[100 * n, *range(100 * n, 100 * n + 5)] for n in range(1, 16)]
    for tokens in prompts:
        bench.put(tokens)
        bench.store.run_pending()
    assert [bench.rows(tokens) for tokens in prompts] == [6] * len(prompts)
    assert len(bench.in_tier(1)) < 2 * len(prompts)  # what RAM still holds is not written


def test_under_pressure_a_full_disk_below_does_not_stop_ram() -> None:
    bench = bench_with(ram=10, local=2, admission="pressure")
    bench.lease(bench.put(range(8)))
    for token in range(100, 140):
        bench.put([token])
        bench.store.run_pending()
    assert bench.rows([139]) == 1


def test_one_block_larger_than_the_queue_is_written_all_the_same() -> None:
    bench = bench_with(queue_bytes=FILE_BYTES // 2)
    blocks = bench.put(range(12))
    bench.store.run_pending()
    assert bench.in_tier(1) == keys_of(blocks)


def test_the_queue_is_bounded_in_bytes_and_drops_the_least_valuable_first() -> None:
    bench = bench_with(ram=20, queue_bytes=4 * FILE_BYTES)
    old = bench.put(range(4 * 4))
    new = bench.put(range(100, 108))
    assert bench.state.unsaved.waiting_bytes == 4 * FILE_BYTES
    queued = set(bench.state.unsaved)
    assert queued == keys_of(old[:2]) | keys_of(new)
    assert bench.store.report().not_written == {"write queue full": 2}


def test_what_did_not_fit_the_queue_is_written_when_it_has_run_dry() -> None:
    bench = bench_with(ram=20, queue_bytes=4 * FILE_BYTES)
    blocks = bench.put(range(4 * 10))
    assert len(bench.state.unsaved) == 4
    bench.store.run_pending()
    assert bench.in_tier(1) == keys_of(blocks)


def test_a_disk_smaller_than_ram_is_written_once_for_each_block() -> None:
    bench = bench_with(ram=8, local=1, queue_bytes=FILE_BYTES)
    for token in range(6):
        bench.put([token])
    steps = iter(range(100))
    while bench.store._mover.step():
        assert next(steps, None) is not None, "one block pushes out another for ever"
    assert len(bench.in_tier(0)) == 6
    assert bench.state.levels[1].stats.written_bytes <= 6 * FILE_BYTES


def test_the_queue_is_bounded_in_seconds_of_the_disk() -> None:
    bench = bench_with(ram=20, queue_seconds=3)
    bench.state.levels[1].speed.write = FILE_BYTES
    bench.put(range(4 * 10))
    assert len(bench.state.unsaved) == 3


def test_ram_beyond_the_queue_takes_new_blocks() -> None:
    bench = bench_with(ram=8, queue_bytes=4 * FILE_BYTES)
    for token in range(20):
        bench.put([token])
    assert len(bench.in_tier(0)) == 8
    assert bench.in_tier(1) == set()


def test_a_chain_shorter_than_the_minimum_is_not_written_down() -> None:
    bench = bench_with(min_tokens=8)
    short = bench.put(range(6))
    bench.store.run_pending()
    assert bench.in_tier(1) == set()
    longer = bench.put(range(9))
    bench.store.run_pending()
    assert bench.in_tier(1) == keys_of(longer)
    assert keys_of(short) & bench.in_tier(1) == {longer[0].key}


def test_a_tail_waits_for_a_longer_one_and_never_reaches_the_disk() -> None:
    bench = bench_with(tail_seconds=10)
    whole, tail = bench.put(range(6))
    bench.store.run_pending()
    assert bench.in_tier(1) == {whole.key}
    written = bench.store.report().tiers[1].stats.written_bytes
    longer = bench.put(range(8))
    bench.tick(20)
    bench.store.run_pending()
    assert bench.in_tier(1) == keys_of(longer)
    assert tail.key not in bench.in_tier(0)
    assert bench.store.report().tiers[1].stats.written_bytes == written + FILE_BYTES


def test_a_tail_that_stays_is_written_down_in_the_end() -> None:
    bench = bench_with(tail_seconds=10)
    blocks = bench.put(range(6))
    bench.tick(10)
    bench.store.run_pending()
    assert bench.in_tier(1) == keys_of(blocks)


def test_a_close_does_not_wait_for_tails() -> None:
    bench = bench_with(tail_seconds=1000)
    blocks = bench.put(range(6))
    assert bench.store.close().blocks == 0
    assert bench.in_tier(1) == keys_of(blocks)


def test_the_days_budget_ends_writing_and_ram_goes_on() -> None:
    bench = bench_with(ram=4, daily_write_bytes=3 * FILE_BYTES)
    bench.put(range(4 * 4))
    bench.store.run_pending()
    report = bench.store.report()
    assert report.tiers[1].blocks == 3
    assert report.tiers[1].written_today_bytes == 3 * FILE_BYTES
    assert report.tiers[1].daily_write_bytes == 3 * FILE_BYTES
    for token in range(100, 110):
        bench.put([token])
    assert len(bench.in_tier(0)) == 4
    assert len(bench.in_tier(1)) == 3
    bench.tick(86400)
    bench.put([200])
    bench.store.run_pending()
    assert len(bench.in_tier(1)) > 3


def test_what_the_days_budget_does_not_reach_for_does_not_keep_ram_over_its_own() -> None:
    """Some of the day is left, too little for a block: it must not wait in RAM till midnight."""
    bench = bench_with(ram=8, daily_write_bytes=5 * FILE_BYTES // 2)
    for token in range(6):
        bench.put([token])
    bench.store.run_pending()
    assert len(bench.in_tier(1)) == 2
    assert len(bench.in_tier(0)) == 6
    bench.store.set_budget(TierKind.RAM, 3 * FILE_BYTES)
    bench.store.run_pending()
    assert len(bench.in_tier(0)) == 2  # the low watermark


def test_the_days_budget_survives_a_restart(tmp_path: Path) -> None:
    def tiers() -> list[tuple[object, int]]:
        return [(MemoryTier(TierKind.RAM), 1 << 20), (FsTier(TierKind.LOCAL, tmp_path), 1 << 20)]

    policy = StorePolicy(daily_write_bytes=3 * FILE_BYTES)
    for expected in (3, 3):
        bench = Bench(tiers=tiers(), policy=policy)  # type: ignore[arg-type]
        bench.put(range(4 * 4))
        bench.store.run_pending()
        assert len(bench.in_tier(1)) == expected
        bench.store.close()


def test_without_ram_the_days_budget_refuses_writers() -> None:
    bench = bench_with(ram=None, daily_write_bytes=2 * FILE_BYTES)
    outcomes = [answer.outcome for answer in bench.reserve(samples.sequence(NS, range(12)))]
    assert outcomes == [Outcome.RESERVED, Outcome.RESERVED, Outcome.REFUSED]


def test_what_was_reserved_and_not_written_is_given_back_to_the_day() -> None:
    bench = bench_with(ram=None, daily_write_bytes=2 * FILE_BYTES)
    bench.reserve(samples.sequence(NS, range(8)))
    bench.session.close()
    assert bench.store.report().tiers[0].written_today_bytes == 0


def test_a_demotion_to_a_remote_tier_wears_no_disk_of_this_machine() -> None:
    tiers = [
        (MemoryTier(TierKind.RAM), 8 * FILE_BYTES),
        (MemoryTier(TierKind.REMOTE), 8 * FILE_BYTES),
    ]
    bench = Bench(tiers=list(tiers), policy=StorePolicy(daily_write_bytes=FILE_BYTES))
    blocks = bench.put(range(12))
    bench.store.run_pending()
    assert bench.in_tier(1) == keys_of(blocks)
    assert bench.store.report().tiers[1].written_today_bytes == 0


def test_a_close_says_what_is_in_ram_only_whatever_the_reason() -> None:
    bench = bench_with(admission="second-touch")
    bench.put(range(8))
    left = bench.store.close()
    assert (left.blocks, left.left_bytes) == (2, 2 * FILE_BYTES)


@pytest.mark.parametrize("admission", ["eager", "second-touch", "pressure"])
def test_every_policy_keeps_what_a_full_ram_cannot(admission: str) -> None:
    bench = bench_with(ram=2, admission=admission)
    bench.put(range(8))
    bench.rows(range(8))
    bench.store.run_pending()
    bench.put(range(100, 108))
    assert bench.rows(range(8)) == 8
