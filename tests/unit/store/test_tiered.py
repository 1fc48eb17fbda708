"""The store's policy: where blocks go, what is evicted, what a match answers."""

from __future__ import annotations

import contextlib
import subprocess
import sys
import threading
from contextlib import AbstractContextManager

import pytest

from measure.store import samples
from ollama_tiering.store.block.key import BlockExtra, BlockKey, NamespaceId, tokens_to_bytes
from ollama_tiering.store.books.state import PROMOTE_AFTER_SECONDS
from ollama_tiering.store.errors import InvalidBlock
from ollama_tiering.store.serving.session import Outcome
from ollama_tiering.store.tiered import TieredStore
from ollama_tiering.store.tiers.contract import TempBlock, Tier, TierKind
from ollama_tiering.store.tiers.memory import MemoryOpenBlock, MemoryTier
from tests.unit.store.support import BLOCK_TOKENS, FILE_BYTES, NAMESPACE, NS, Bench, keys_of


def test_a_block_is_in_ram_first_and_written_down_soon() -> None:
    bench = Bench()
    blocks = bench.put(range(10))
    assert bench.in_tier(0) == keys_of(blocks)
    assert bench.in_tier(1) == set()
    bench.store.run_pending()
    assert bench.in_tier(0) == bench.in_tier(1) == keys_of(blocks)
    assert [block.tier for block in bench.match(range(10))] == [TierKind.RAM] * 3


def test_write_down_is_oldest_first_some_at_once() -> None:
    bench = Bench(ram=64, local=64)
    old, new = bench.put(range(4 * 32)), bench.put(range(1000, 1008))
    bench.store._mover.step()
    assert bench.in_tier(1) == keys_of(old)
    bench.store._mover.step()
    assert bench.in_tier(1) == keys_of(old) | keys_of(new)


def test_above_the_high_watermark_ram_is_emptied_to_the_low_one() -> None:
    bench = Bench(ram=10, local=100, high_watermark=0.9, low_watermark=0.5)
    blocks = bench.put(range(4 * 10))
    bench.store.run_pending()
    assert len(bench.in_tier(0)) == 5
    assert bench.in_tier(1) == keys_of(blocks)
    assert bench.rows(range(4 * 10)) == 40
    assert bench.store.report().tiers[0].stats.demoted_blocks == 5


def test_below_the_high_watermark_nothing_leaves_ram() -> None:
    bench = Bench(ram=10, local=100, high_watermark=0.9, low_watermark=0.5)
    blocks = bench.put(range(4 * 9))
    bench.store.run_pending()
    assert bench.in_tier(0) == keys_of(blocks)


def test_a_full_ram_that_is_not_written_down_yet_sends_writers_to_the_local_tier() -> None:
    bench = Bench(ram=2, local=8)
    blocks = bench.put(range(16))
    assert bench.in_tier(0) == keys_of(blocks[:2])
    assert bench.in_tier(1) == keys_of(blocks[2:])
    tiers = [block.tier for block in bench.match(range(16))]
    assert tiers == [TierKind.RAM] * 2 + [TierKind.LOCAL] * 2


def test_ram_written_down_makes_room_for_writers() -> None:
    bench = Bench(ram=2, local=8)
    bench.put(range(8))
    bench.store.run_pending()
    later = bench.put(range(100, 108))
    assert bench.in_tier(0) == keys_of(later)
    assert bench.rows(range(8)) == 8


def test_the_last_tier_drops_least_recently_used_first() -> None:
    bench = Bench(ram=None, local=3)
    one, two, three = (bench.put([i])[0] for i in range(3))
    assert bench.rows([0]) == 1
    four = bench.put([9])[0]
    assert bench.in_tier(0) == {one.key, three.key, four.key}
    assert two.key not in bench.in_tier(0)
    assert bench.store.report().tiers[0].stats.evicted_blocks == 1


def test_leaves_go_before_their_parents() -> None:
    bench = Bench(ram=None, local=5)
    chain = bench.put(range(20))
    bench.put([100])
    bench.put([101])
    assert bench.rows(range(20)) == 12
    assert chain[0].key in bench.in_tier(0)


def test_a_parent_of_a_fresh_child_outlives_older_leaves() -> None:
    bench = Bench(ram=None, local=4)
    bench.put(range(8))
    bench.put([50])
    bench.put([*range(4), 60, 61])  # a second child of the first block
    bench.put([51])
    assert bench.rows([*range(4), 60, 61]) == 6
    assert bench.rows(range(8)) == 4


def test_a_long_chain_does_not_eat_itself() -> None:
    bench = Bench(ram=None, local=4)
    results = bench.try_put(samples.sequence(NS, range(40)))
    assert [result.stored for result in results] == [True] * 4 + [False] * 6
    assert bench.rows(range(40)) == 16


def test_after_the_first_without_room_there_is_none_for_the_rest() -> None:
    bench = Bench(ram=None, local=2)
    outcomes = [r.outcome for r in bench.reserve(samples.sequence(NS, range(16)))]
    assert outcomes == [Outcome.RESERVED] * 2 + [Outcome.NO_ROOM] * 2


def test_reservations_count_against_the_budget() -> None:
    bench = Bench(ram=None, local=2)
    bench.reserve(samples.sequence(NS, range(8)))
    other = bench.store.open_session(NAMESPACE, NS.fields(), BLOCK_TOKENS)
    (answer,) = other.reserve([samples.sequence(NS, [77])[0].offer])
    assert answer.outcome is Outcome.NO_ROOM
    bench.store.close_session(bench.session)
    (answer,) = other.reserve([samples.sequence(NS, [77])[0].offer])
    assert answer.outcome is Outcome.RESERVED


def test_leased_blocks_are_not_evicted_until_released() -> None:
    bench = Bench(ram=None, local=2)
    blocks = bench.put(range(8))
    lease = bench.lease(blocks)
    (answer,) = bench.reserve(samples.sequence(NS, [77]))
    assert answer.outcome is Outcome.NO_ROOM
    bench.store.release(lease)
    (answer,) = bench.reserve(samples.sequence(NS, [77]))
    assert answer.outcome is Outcome.RESERVED


def test_a_lease_ends_by_itself() -> None:
    bench = Bench(ram=None, local=2)
    lease = bench.lease(bench.put(range(8)))
    bench.tick(59)
    assert bench.reserve(samples.sequence(NS, [77]))[0].outcome is Outcome.NO_ROOM
    bench.tick(1)
    assert bench.reserve(samples.sequence(NS, [77]))[0].outcome is Outcome.RESERVED
    bench.store.release(lease)  # late is fine
    assert bench.store.report().open_leases == 0


def test_two_leases_on_one_block_are_two_pins() -> None:
    bench = Bench(ram=None, local=1)
    blocks = bench.put([1])
    first, second = bench.lease(blocks), bench.lease(blocks)
    bench.store.release(first)
    bench.store.release(first)
    assert bench.reserve(samples.sequence(NS, [77]))[0].outcome is Outcome.NO_ROOM
    bench.store.release(second)
    assert bench.reserve(samples.sequence(NS, [77]))[0].outcome is Outcome.RESERVED


def test_a_late_reservation_is_released() -> None:
    bench = Bench()
    (block,) = samples.sequence(NS, [1])
    (reserved,) = bench.reserve([block])
    bench.fill(reserved, block.data)
    bench.tick(120)
    assert bench.session.release_expired(bench.now) == 1
    (result,) = bench.session.commit([reserved.reservation_id])
    assert not result.stored
    assert bench.store.report().tiers[0].reserved_bytes == 0
    assert bench.reserve([block])[0].outcome is Outcome.RESERVED


def test_a_match_ends_inside_the_best_child() -> None:
    bench = Bench()
    bench.put([0, 1, 2, 3, 4, 5, 6, 7])
    bench.put([0, 1, 2, 3, 4, 9])
    for tokens, rows in (
        ([0, 1, 2, 3, 4, 5, 6, 8], 7),
        ([0, 1, 2, 3, 4, 9, 9, 9], 6),
        ([0, 1, 2, 3, 4], 5),
        ([0, 1, 2, 3, 9], 4),
        ([0, 1, 7], 2),
        ([7], 0),
        ([], 0),
    ):
        assert bench.rows(tokens) == rows, tokens


def test_a_match_of_another_namespace_is_empty() -> None:
    bench = Bench()
    bench.put(range(8))
    other = samples.namespace("other", layers=1)
    chain = [block.key for block in samples.sequence(NS, range(8))]
    assert bench.store.match(other.digest(), chain, bytes(32), BLOCK_TOKENS) == []


def test_a_key_of_other_tokens_does_not_match() -> None:
    bench = Bench()
    (block,) = bench.put([1, 2, 3, 4])
    lie = tokens_to_bytes([1, 2, 3, 5])
    (matched,) = bench.store.match(NAMESPACE, [block.key], lie, BLOCK_TOKENS)
    assert matched.rows == 3


def test_rows_from_an_image_on_match_by_key_only() -> None:
    bench = Bench()
    image = BlockExtra(2, bytes(32))
    bench.put([1, 2, 3, 4], [image])
    assert bench.rows([1, 2, 3, 4]) == 2
    assert sum(block.rows for block in bench.match([1, 2, 3, 4], [image])) == 4


def test_a_longer_tail_replaces_the_one_it_covers() -> None:
    bench = Bench()
    (short,) = bench.put([1, 2])
    bench.store.run_pending()
    (long,) = bench.put([1, 2, 3])
    bench.store.run_pending()
    assert bench.in_tier(0) == bench.in_tier(1) == {long.key}
    assert short.key not in bench.in_tier(0)
    assert bench.rows([1, 2]) == 2


def test_a_tail_that_is_no_prefix_stays() -> None:
    bench = Bench()
    bench.put([1, 2])
    bench.put([1, 3, 4])
    assert bench.rows([1, 2]) == 2
    assert bench.rows([1, 3, 4]) == 3


def test_a_leased_tail_is_not_replaced() -> None:
    bench = Bench()
    short = bench.put([1, 2])
    lease = bench.lease(short)
    bench.put([1, 2, 3])
    assert keys_of(short) <= bench.in_tier(0)
    bench.store.release(lease)


def test_a_tail_covered_already_is_done_without_being_stored() -> None:
    bench = Bench()
    long = bench.put([1, 2, 3])
    (result,) = bench.try_put(samples.sequence(NS, [1, 2]))
    assert result.stored
    assert "covered" in result.reason
    assert bench.in_tier(0) == keys_of(long)
    assert bench.store.report().tiers[0].reserved_bytes == 0


def test_a_block_with_another_image_is_not_covered() -> None:
    bench = Bench()
    bench.put([1, 2, 3], [BlockExtra(0, bytes(32))])
    (plain,) = bench.put([1, 2])
    assert plain.key in bench.in_tier(0)
    assert bench.rows([1, 2]) == 2


def rebooted() -> tuple[Bench, list[samples.SampleBlock]]:
    """Of eight tokens the blocks are on the disk alone."""
    bench = Bench(ram=8, local=8)
    blocks = bench.put(range(8))
    bench.store.run_pending()
    bench.store.close()
    bench.tiers[0] = (MemoryTier(TierKind.RAM), 8 * FILE_BYTES)
    bench.open()
    return bench, blocks


def test_a_hit_below_ram_is_promoted_when_ram_has_room() -> None:
    bench, blocks = rebooted()
    assert [block.tier for block in bench.match(range(8))] == [TierKind.LOCAL] * 2
    bench.store.release(bench.lease(blocks))
    bench.tick(PROMOTE_AFTER_SECONDS - 0.1)
    bench.store.run_pending()
    assert bench.in_tier(0) == set()  # the client computes
    bench.tick(0.2)
    bench.store.run_pending()
    assert [block.tier for block in bench.match(range(8))] == [TierKind.RAM] * 2
    assert bench.store.report().tiers[0].stats.promoted_blocks == 2


def test_a_block_is_not_promoted_while_the_client_reads_it() -> None:
    bench, blocks = rebooted()
    bench.lease(blocks)
    bench.store.run_pending()
    assert bench.in_tier(0) == set()
    bench.tick(60)  # the lease's end counts as a release
    bench.store.report()
    bench.tick(PROMOTE_AFTER_SECONDS)
    bench.store.run_pending()
    assert bench.in_tier(0) == keys_of(blocks)


def test_a_block_that_is_read_again_is_promoted_after_that() -> None:
    bench, blocks = rebooted()
    bench.store.release(bench.lease(blocks))
    bench.tick(PROMOTE_AFTER_SECONDS - 1)
    again = bench.lease(blocks)
    bench.tick(2)
    bench.store.run_pending()
    assert bench.in_tier(0) == set()
    bench.store.release(again)
    bench.tick(PROMOTE_AFTER_SECONDS)
    bench.store.run_pending()
    assert bench.in_tier(0) == keys_of(blocks)


def test_promotion_evicts_nothing() -> None:
    bench = Bench(ram=2, local=8, high_watermark=1.0, low_watermark=0.99)
    old = bench.put(range(8))
    bench.store.run_pending()
    new = bench.put(range(100, 108))
    bench.store.run_pending()
    bench.store.release(bench.lease(old))
    bench.tick(PROMOTE_AFTER_SECONDS)
    bench.store.run_pending()
    assert bench.in_tier(0) == keys_of(new)


def test_remove_seq_stops_at_what_another_sequence_needs() -> None:
    bench = Bench()
    one = bench.put(range(10))
    bench.put([*range(4), 90, 91])
    bench.store.run_pending()
    blocks, removed = bench.store.remove_seq(NAMESPACE, [block.key for block in one])
    assert (blocks, removed) == (2, 4 * FILE_BYTES)  # both tiers
    assert bench.rows([*range(4), 90, 91]) == 6
    assert bench.rows(range(10)) == 4


def test_remove_seq_leaves_leased_blocks() -> None:
    bench = Bench()
    blocks = bench.put(range(8))
    bench.lease(blocks)
    assert bench.store.remove_seq(NAMESPACE, [block.key for block in blocks]) == (0, 0)


def test_a_damaged_ram_copy_is_quarantined_and_the_lower_one_serves() -> None:
    bench = Bench()
    (block,) = bench.put([1, 2, 3])
    bench.store.run_pending()
    bench.damage(0, block.key)
    assert bench.store.report_corrupt(NAMESPACE, block.key)
    assert [found.tier for found in bench.match([1, 2, 3])] == [TierKind.LOCAL]
    report = bench.store.report()
    assert report.tiers[0].stats.quarantined_blocks == 1
    assert report.counters.misses["corrupt"] == 1


def test_a_report_about_an_intact_block_changes_nothing() -> None:
    bench = Bench()
    (block,) = bench.put([1, 2, 3])
    assert not bench.store.report_corrupt(NAMESPACE, block.key)
    assert not bench.store.report_corrupt(NAMESPACE, BlockKey(bytes(32)))
    assert bench.rows([1, 2, 3]) == 3


def test_damage_is_found_when_a_block_is_written_down() -> None:
    bench = Bench()
    (block,) = bench.put([1, 2, 3])
    bench.damage(0, block.key)
    bench.store.run_pending()
    assert bench.in_tier(0) == bench.in_tier(1) == set()
    assert bench.store.report().tiers[0].stats.quarantined_blocks == 1
    assert bench.rows([1, 2, 3]) == 0
    bench.put([1, 2, 3])
    assert bench.rows([1, 2, 3]) == 3


def test_quarantined_bytes_count_and_go_before_there_is_no_room() -> None:
    bench = Bench(ram=None, local=2)
    (one,) = bench.put([1])
    two = bench.put([2])
    bench.damage(0, one.key)
    bench.store.report_corrupt(NAMESPACE, one.key)
    assert bench.store.report().tiers[0].used_bytes == 2 * FILE_BYTES
    bench.lease(two)
    bench.put([3])
    assert bench.tiers[0][0].quarantined_bytes() == 0
    assert bench.store.report().tiers[0].blocks == 2


def test_a_file_that_vanished_is_a_miss_and_forgotten() -> None:
    bench = Bench(local=None)
    blocks = bench.put(range(8))
    tier = bench.tiers[0][0]
    tier.remove(NAMESPACE, blocks[1].key)
    leased = bench.store.lease(NAMESPACE, [block.key for block in blocks])
    assert [block.key for block in leased.blocks] == [blocks[0].key]
    assert bench.store.report().counters.misses["file gone"] == 1
    assert bench.rows(range(8)) == 4


def test_a_close_says_what_was_left() -> None:
    bench = Bench()
    blocks = bench.put(range(12))
    left = bench.store.close(drain_seconds=0)
    assert (left.blocks, left.left_bytes) == (3, 3 * FILE_BYTES)
    bench.open()  # it was in RAM, which is still there
    assert bench.rows(range(12)) == 12
    assert bench.store.close(drain_seconds=10).blocks == 0
    assert bench.in_tier(1) == keys_of(blocks)


def test_a_smaller_budget_holds_from_the_start() -> None:
    bench = Bench(ram=None, local=8)
    bench.put(range(32))
    bench.store.close()
    bench.tiers[0] = (bench.tiers[0][0], 3 * FILE_BYTES)
    bench.open()
    assert bench.store.report().tiers[0].used_bytes <= 3 * FILE_BYTES
    assert bench.rows(range(32)) == 12


def test_a_block_larger_than_the_local_tier_stays_in_ram_and_may_be_evicted() -> None:
    bench = Bench(ram=2, local=0)
    bench.put(range(8))
    bench.store.run_pending()
    bench.put([50])
    assert bench.store.report().tiers[0].blocks == 2


def test_use_survives_a_restart() -> None:
    bench = Bench(ram=None, local=3)
    for token in range(3):
        bench.put([token])
    bench.rows([0])
    bench.store.close()
    bench.open()
    bench.put([9])
    # Without an index the files' times count; the memory tier has none, so any may go.
    assert bench.store.report().tiers[0].blocks == 3


def test_a_namespace_must_be_the_digest_of_its_description() -> None:
    bench = Bench()
    with pytest.raises(InvalidBlock, match="not the digest"):
        bench.store.open_session(NAMESPACE, NS.fields()[:-1], BLOCK_TOKENS)
    with pytest.raises(InvalidBlock, match="block_tokens"):
        bench.store.open_session(NAMESPACE, NS.fields(), BLOCK_TOKENS + 1)


def test_misses_and_hits_are_counted() -> None:
    bench = Bench()
    bench.rows([1, 2, 3])
    bench.put([1, 2, 3])
    bench.rows([1, 2, 9])
    counters = bench.store.report().counters
    assert (counters.has_calls, counters.asked_tokens, counters.matched_tokens) == (2, 6, 2)
    assert counters.misses == {"unknown prefix": 1}
    assert (counters.put_blocks, counters.put_bytes) == (1, FILE_BYTES)


class StuckTier(MemoryTier):
    """Its writes wait, as on a disk that hangs."""

    def __init__(self) -> None:
        super().__init__(TierKind.LOCAL)
        self.entered = threading.Event()
        self.go_on = threading.Event()

    def publish(self, temp: TempBlock, *, durable: bool = True) -> int:
        self.entered.set()
        assert self.go_on.wait(30)
        return super().publish(temp)


HANGING_DISK = """
import threading
from measure.store import samples
from ollama_tiering.store.tiers.memory import MemoryTier
from ollama_tiering.store.tiers.contract import TierKind
from ollama_tiering.store.tiered import TieredStore

class HangingTier(MemoryTier):
    entered = threading.Semaphore(0)

    def create(self, namespace, key, file_bytes):
        self.entered.release()
        threading.Event().wait()  # for ever, as on a dead disk

ns = samples.namespace()
tiers = [(MemoryTier(TierKind.RAM), 1 << 20), (HangingTier(TierKind.LOCAL), 1 << 20)]
store = TieredStore(tiers, measure=False)
session = store.open_session(ns.digest(), ns.fields(), 4)
blocks = samples.sequence(ns, range(16))
answers = session.reserve([block.offer for block in blocks])
for block, answer in zip(blocks, answers):
    session._pending[answer.reservation_id].temp.write_at(0, block.data)
session.commit([answer.reservation_id for answer in answers])
for _ in range(2):  # two at once
    assert HangingTier.entered.acquire(timeout=30)
print(store.close(drain_seconds=0.1).blocks)
"""


def test_writes_that_hang_do_not_keep_the_process_from_ending() -> None:
    command = [sys.executable, "-c", HANGING_DISK]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    assert (done.returncode, done.stdout) == (0, "4\n"), done.stderr


def test_a_disk_that_hangs_blocks_no_lookup_and_no_writer() -> None:
    stuck = StuckTier()
    ram = MemoryTier(TierKind.RAM)
    store = TieredStore([(ram, 8 * FILE_BYTES), (stuck, 8 * FILE_BYTES)], measure=False)
    session = store.open_session(NAMESPACE, NS.fields(), BLOCK_TOKENS)

    def put(token: int) -> bool:
        (block,) = samples.sequence(NS, [token])
        (reserved,) = session.reserve([block.offer])
        session._pending[reserved.reservation_id].temp.write_at(0, block.data)
        return session.commit([reserved.reservation_id])[0].stored

    try:
        assert put(1)
        assert stuck.entered.wait(30)
        done = threading.Event()

        def use() -> None:
            assert store.match(NAMESPACE, [], (1).to_bytes(4, "little"), BLOCK_TOKENS)
            assert put(2)
            done.set()

        threading.Thread(target=use, daemon=True).start()
        assert done.wait(10)
    finally:
        stuck.go_on.set()
        store.close()
    assert len(stuck.blocks) == 2


def test_a_close_ends_in_time_while_the_disk_hangs_and_says_what_is_left() -> None:
    stuck = StuckTier()
    tiers: list[tuple[Tier, int]] = [
        (MemoryTier(TierKind.RAM), 8 * FILE_BYTES),
        (stuck, 8 * FILE_BYTES),
    ]
    store = TieredStore(tiers, measure=False)
    session = store.open_session(NAMESPACE, NS.fields(), BLOCK_TOKENS)
    for block in samples.sequence(NS, range(8)):
        (reserved,) = session.reserve([block.offer])
        session._pending[reserved.reservation_id].temp.write_at(0, block.data)
        assert session.commit([reserved.reservation_id])[0].stored
    assert stuck.entered.wait(30)
    try:
        left = store.close(drain_seconds=0.05)
        assert (left.blocks, left.left_bytes) == (2, 2 * FILE_BYTES)
    finally:
        stuck.go_on.set()


def test_a_disk_that_hangs_while_draining_does_not_keep_the_process(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("ollama_tiering.store.tiered._SAVE_SECONDS", 0.05)
    stuck = StuckTier()
    bench = Bench(tiers=[(MemoryTier(TierKind.RAM), 8 * FILE_BYTES), (stuck, 8 * FILE_BYTES)])
    bench.put(range(8))
    try:
        assert bench.store.close(drain_seconds=0.05).blocks == 2
    finally:
        stuck.go_on.set()


class ColdTier(MemoryTier):
    """As a disk: what is opened is not in the page cache."""

    def open(self, namespace: NamespaceId, key: BlockKey) -> AbstractContextManager[ColdBlock]:  # type: ignore[override]
        return contextlib.nullcontext(ColdBlock(self.blocks[namespace, key]))


class ColdBlock(MemoryOpenBlock):
    def resident(self) -> bool | None:
        return False


def test_the_speed_of_a_disk_is_learnt_from_blocks_that_clients_read() -> None:
    wide = samples.namespace("wide", kv_heads=8, head_dim=512)
    (block,) = samples.sequence(wide, [1, 2, 3, 4])
    disk = ColdTier(TierKind.LOCAL)
    store = TieredStore([(disk, 1 << 30)], background=False, measure=False)
    session = store.open_session(wide.digest(), wide.fields(), 4)
    (reserved,) = session.reserve([block.offer])
    session._pending[reserved.reservation_id].temp.write_at(0, block.data)
    session.commit([reserved.reservation_id])
    assert store.report().tiers[0].read_bytes_per_second == 0
    store.lease(wide.digest(), [block.key])
    store.run_pending()
    assert store.report().tiers[0].read_bytes_per_second > 0
