"""What rules come to in the store: kept out, removed, dropped after a time, held to a budget."""

from __future__ import annotations

import logging
import os
from dataclasses import replace
from pathlib import Path

import pytest

from measure.store import samples
from ollama_tiering.store.block.key import NamespaceId, tokens_to_bytes
from ollama_tiering.store.books.terms import Terms, TermsTable
from ollama_tiering.store.errors import NoRoom
from ollama_tiering.store.serving.session import Outcome
from ollama_tiering.store.tiers.contract import TierKind
from ollama_tiering.store.tiers.directory import FsTier
from ollama_tiering.store.tiers.memory import MemoryTier
from ollama_tiering.store.tiers.names import PINS_NAME
from ollama_tiering.store.tools.admin import Administration
from ollama_tiering.store.upkeep.expiry import START_SECONDS
from ollama_tiering.store.upkeep.opening import learn_described
from ollama_tiering.store.values import Selection
from tests.unit.store.remote_bench import RemoteBench, files
from tests.unit.store.ruled import DAY, Ruled
from tests.unit.store.support import (
    BLOCK_TOKENS,
    FILE_BYTES,
    NAMESPACE,
    NS,
    Bench,
    keys_of,
    path_of,
)

FORBIDDEN = Terms(name="sample:latest", refusal="a rule", remove=True)
WITHHELD = Terms(refusal="a doubt")


# --- kept out -----------------------------------------------------------------------------------


def test_what_may_not_be_stored_is_not_taken_and_says_why() -> None:
    bench = Ruled()
    bench.rule(FORBIDDEN)
    blocks = samples.sequence(NS, range(8))
    answers = bench.reserve(blocks)
    assert [(a.outcome, a.reason) for a in answers] == [(Outcome.REFUSED, "a rule")] * 2
    with pytest.raises(NoRoom, match="a rule"):
        bench.session.put_inline(blocks[0].key, blocks[0].data, last=True)
    assert not bench.state.writing
    assert bench.store.report().tiers[0].used_bytes == 0
    assert bench.put_other(range(8))


def test_a_rule_that_comes_while_a_block_is_being_filled_keeps_it_out() -> None:
    bench = Ruled()
    (block,) = samples.sequence(NS, range(4))
    (reserved,) = bench.reserve([block])
    bench.fill(reserved, block.data)
    bench.rule(FORBIDDEN)
    (result,) = bench.session.commit([reserved.reservation_id])
    assert (result.stored, result.reason) == (False, "a rule")
    assert bench.in_tier(0) == set()
    assert bench.store.report().tiers[0].reserved_bytes == 0


@pytest.mark.parametrize("terms", [FORBIDDEN, WITHHELD])
def test_what_was_stored_before_is_neither_found_nor_given_out(terms: Terms) -> None:
    bench = Ruled()
    blocks = bench.put(range(8))
    bench.rule(terms)
    assert bench.match(range(8)) == []
    assert bench.store.lease(NAMESPACE, [block.key for block in blocks]).blocks == []
    counters = bench.store.report().counters
    assert counters.misses == {"kept out by a rule": 1}
    assert counters.hits == 0


def test_what_is_only_withheld_stays_and_is_found_again() -> None:
    bench = Ruled()
    blocks = bench.put(range(8))
    bench.rule(WITHHELD)
    bench.store.run_pending()
    assert bench.in_tier(0) == keys_of(blocks)
    assert bench.in_tier(1) == set()  # and it is not written down meanwhile
    bench.rule(Terms())
    assert bench.rows(range(8)) == 8


def test_a_rule_removes_what_is_stored_from_every_tier_and_says_so(
    caplog: pytest.LogCaptureFixture,
) -> None:
    caplog.set_level(logging.INFO, "ollama_tiering")
    bench = Ruled()
    bench.put(range(12))
    bench.put([0, 1, 2, 3, 9])
    kept = bench.put_other(range(8))
    bench.store.run_pending()
    bench.rule(FORBIDDEN)
    bench.store.run_pending()
    assert bench.in_tier(0) == bench.in_tier(1) == keys_of(kept)
    assert "removed by a rule: model=sample:latest blocks=4" in caplog.text
    caplog.clear()
    bench.store.run_pending()
    assert caplog.text == ""
    bench.rule(Terms())
    assert bench.put(range(8))
    assert bench.rows(range(8)) == 8


def test_what_is_being_read_is_removed_when_it_no_longer_is() -> None:
    bench = Ruled()
    blocks = bench.put(range(8))
    lease = bench.lease(blocks)
    bench.rule(FORBIDDEN)
    bench.store.run_pending()
    assert bench.in_tier(0) == keys_of(blocks)
    bench.store.release(lease)
    bench.tick(11)
    bench.store.run_pending()
    assert bench.in_tier(0) == set()


def test_a_rule_lifts_pins(tmp_path: Path) -> None:
    tier = FsTier(TierKind.LOCAL, tmp_path / "local")
    bench = Ruled(tiers=[(tier, 80 * FILE_BYTES)])
    blocks = bench.put(range(8))
    bench.store.pins.pin(blocks[-1].key)
    bench.rule(FORBIDDEN)
    bench.store.run_pending()
    assert bench.in_tier(0) == set()
    assert blocks[0].key.hex() not in (tmp_path / "local" / PINS_NAME).read_text()


def test_damaged_files_go_with_what_a_rule_removes(tmp_path: Path) -> None:
    tier = FsTier(TierKind.LOCAL, tmp_path / "local")
    bench = Ruled(tiers=[(tier, 80 * FILE_BYTES)])
    blocks = bench.put(range(8))
    path = path_of(tier, blocks[1].key)
    path.chmod(0o600)
    path.write_bytes(blocks[1].data[:4096] + b"x" + blocks[1].data[4097:])
    assert bench.store.report_corrupt(NAMESPACE, blocks[1].key)
    assert list(tmp_path.rglob("*.bad"))
    bench.rule(FORBIDDEN)
    bench.store.run_pending()
    assert not list(tmp_path.rglob("*.kvb*"))


def test_damaged_files_go_when_nothing_else_is_left(tmp_path: Path) -> None:
    tier = FsTier(TierKind.LOCAL, tmp_path / "local")
    bench = Ruled(tiers=[(tier, 80 * FILE_BYTES)])
    (block,) = bench.put(range(4))
    path = path_of(tier, block.key)
    path.chmod(0o600)
    path.write_bytes(block.data[:4096] + b"x" + block.data[4097:])
    assert bench.store.report_corrupt(NAMESPACE, block.key)
    bench.terms = {"other": FORBIDDEN}
    bench.store.set_terms(bench.decide)
    bench.store.run_pending()
    assert list(tmp_path.rglob("*.bad"))  # of a model that no rule forbids
    bench.rule(FORBIDDEN)
    bench.store.run_pending()
    assert not list(tmp_path.rglob("*.bad"))


def test_much_is_removed_in_pieces_and_as_long_as_the_rule_says_so(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("ollama_tiering.store.upkeep.withdrawal._CHAINS_PER_PIECE", 2)
    bench = Ruled()
    for start in range(0, 50, 10):
        bench.put(range(start, start + 4))
    withdrawal = bench.store._withdrawal
    bench.rule(FORBIDDEN)
    assert withdrawal.run()
    assert len(bench.in_tier(0)) == 3
    bench.rule(Terms())
    withdrawal.run()
    assert len(bench.in_tier(0)) == 3
    bench.rule(FORBIDDEN)
    for left in (1, 0):
        assert withdrawal.run()
        assert len(bench.in_tier(0)) == left
    assert not withdrawal.run()


def test_what_is_in_use_does_not_keep_the_next_piece_waiting(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("ollama_tiering.store.upkeep.withdrawal._CHAINS_PER_PIECE", 1)
    bench = Ruled()
    chains = [bench.put(range(start, start + 4)) for start in range(0, 40, 10)]
    bench.lease(chains[-1])
    bench.lease(chains[0])
    bench.rule(FORBIDDEN)
    bench.store.run_pending()
    assert bench.in_tier(0) == keys_of(chains[0] + chains[-1])


def test_after_a_restart_the_rule_holds_from_the_first_look_up_on(tmp_path: Path) -> None:
    tier = FsTier(TierKind.LOCAL, tmp_path / "local")
    bench = Ruled(tiers=[(tier, 80 * FILE_BYTES)])
    blocks = bench.put(range(8))
    bench.terms["sample"] = FORBIDDEN
    bench.open()
    bench.store._state.terms.learn(NAMESPACE, "")  # a session says nothing new
    assert bench.match(range(8)) == []
    bench.store.run_pending()
    assert not keys_of(blocks) & bench.in_tier(0)


def test_a_namespace_is_known_by_its_description_before_anybody_writes(tmp_path: Path) -> None:
    tier = FsTier(TierKind.LOCAL, tmp_path / "local")
    bench = Ruled(tiers=[(tier, 80 * FILE_BYTES)])
    bench.put(range(8))
    table = TermsTable(lambda model: Terms(name=model))
    learn_described(table, [tmp_path / "local", tmp_path / "nowhere", None])
    assert table.of(NAMESPACE).name == "sample"


def test_what_a_runner_says_does_not_replace_what_a_description_says() -> None:
    table = TermsTable(lambda model: Terms(name=model))
    name = NamespaceId(bytes(32))
    table.learn(name, "said", sure=False)
    assert table.of(name).name == "said"
    table.learn(name, "described")
    table.learn(name, "said again", sure=False)
    assert table.of(name).name == "described"


def test_gc_removes_what_a_rule_forbids_also_without_a_sidecar() -> None:
    bench = Ruled()
    bench.put(range(8))
    kept = bench.put_other(range(4))
    bench.rule(FORBIDDEN)
    admin = Administration(bench.store, alone=True)
    dry = admin.collect(older_than_seconds=0, models=None, dry_run=True)
    assert ("forbidden", 2) in [(waste.kind, waste.files) for waste in dry]
    admin.collect(older_than_seconds=0, models=None, dry_run=False)
    assert [line.key for line in admin.listing(Selection()).chains] == [kept[0].key]


# --- dropped after a time -----------------------------------------------------------------------


def test_each_model_has_its_own_time() -> None:
    bench = Ruled()
    bench.terms = {"sample": Terms(ttl_seconds=2 * DAY), "other": Terms(ttl_seconds=9 * DAY)}
    bench.store.set_terms(bench.decide)
    bench.put_other(range(4))
    bench.put(range(8))
    old = bench.put_other(range(100, 108))
    bench.pass_days(1.9)
    assert bench.rows(range(4)) == 4  # used again: the first of two blocks
    bench.pass_days(1)
    assert bench.rows(range(8)) == 4
    assert bench.other_rows(range(4)) == 4
    bench.pass_days(7)
    assert bench.rows(range(8)) == 0
    assert not keys_of(old) & bench.in_tier(0)
    assert bench.other_rows(range(4)) == 4


def test_never_is_a_time_too_and_holds_beside_a_shorter_one_for_the_others() -> None:
    bench = Ruled()
    bench.terms = {"other": Terms(ttl_seconds=DAY)}
    bench.store.set_terms(bench.decide)
    kept = bench.put(range(4 * 3))
    bench.put_other(range(8))
    bench.pass_days(5)
    assert bench.in_tier(0) == bench.in_tier(1) == keys_of(kept)


def test_another_time_holds_at_once() -> None:
    bench = Ruled()
    bench.put(range(8))
    bench.pass_days(5)
    assert len(bench.in_tier(0)) == 2
    bench.rule(Terms(ttl_seconds=DAY))
    bench.tick(100)
    bench.store.run_pending()
    assert bench.in_tier(0) == set()


def test_a_pinned_chain_is_kept_beyond_its_time() -> None:
    bench = Ruled()
    bench.rule(Terms(ttl_seconds=DAY))
    pinned, loose = bench.put(range(8)), bench.put(range(100, 104))
    bench.store.pins.pin(pinned[-1].key)
    bench.pass_days(5)
    assert bench.in_tier(1) == keys_of(pinned)
    assert not keys_of(loose) & bench.in_tier(1)


def test_thousands_of_blocks_with_a_longer_time_do_not_hide_one_that_is_too_old() -> None:
    bench = Ruled(ram=None, local=3000)
    bench.terms = {"sample": Terms(ttl_seconds=30 * DAY), "other": Terms(ttl_seconds=DAY)}
    bench.store.set_terms(bench.decide)
    bench.put(range(4 * 2200))
    bench.put_other(range(4))
    bench.pass_days(3)
    assert bench.other_rows(range(4)) == 0
    assert bench.rows(range(4 * 2200)) == 4 * 2200


def test_a_shared_tier_drops_what_nobody_used_for_so_long(tmp_path: Path) -> None:
    bench = RemoteBench(tmp_path / "remote", decide=lambda _: Terms(ttl_seconds=DAY))
    bench.put(range(4 * 8))
    bench.store.run_pending()
    bench.put(range(100, 100 + 4 * 8))
    bench.store.run_pending()
    assert files(tmp_path / "remote")
    for hour in range(40):
        bench.tick(3600)
        for file in (tmp_path / "remote").rglob("*.kvb"):  # the file server's clock is the real one
            os.utime(file, (file.stat().st_mtime - 3600,) * 2)
        bench.store.run_pending()
        assert files(tmp_path / "remote") or hour > 20
    assert not files(tmp_path / "remote")
    assert bench.store.report().tiers[2].stats.expired_blocks
    bench.store.close(drain_seconds=0)


def test_nothing_is_dropped_from_a_shared_tier_right_after_a_start(tmp_path: Path) -> None:
    bench = RemoteBench(tmp_path / "remote", decide=lambda _: Terms(ttl_seconds=1))
    bench.put(range(4 * 8))
    bench.store.run_pending()
    bench.put(range(100, 100 + 4 * 8))
    bench.store.run_pending()
    assert files(tmp_path / "remote")
    for _ in range(5):
        bench.tick(START_SECONDS / 10)
        bench.store.run_pending()
    assert files(tmp_path / "remote")
    bench.store.close(drain_seconds=0)


# --- held to a budget ---------------------------------------------------------------------------


def held(bench: Bench, level: int = 1) -> int:
    tier = bench.tiers[level][0]
    assert isinstance(tier, MemoryTier)
    return sum(len(data) for (name, _), data in tier.blocks.items() if name == NAMESPACE)


def test_a_model_takes_no_more_of_the_disk_than_its_budget_and_its_oldest_goes() -> None:
    bench = Ruled(ram=40, local=40)
    bench.rule(Terms(budget_bytes=4 * FILE_BYTES))
    others = bench.put_other(range(4 * 6))
    for number in range(8):
        bench.put([1000 + 10 * number])
        bench.store.run_pending()
        assert held(bench) <= 4 * FILE_BYTES
    newest = {b.key for n in range(5, 8) for b in samples.sequence(NS, [1000 + 10 * n])}
    assert newest <= bench.in_tier(1)
    assert keys_of(others) <= bench.in_tier(1)  # older, and another model's
    assert held(bench, 0) == 8 * FILE_BYTES  # RAM has no such bound


def test_a_lowered_budget_holds_at_once() -> None:
    bench = Ruled(ram=20, local=40)
    bench.put(range(4 * 10))
    bench.store.run_pending()
    assert held(bench) == 10 * FILE_BYTES
    bench.rule(Terms(budget_bytes=3 * FILE_BYTES))
    bench.store.run_pending()
    assert held(bench) == 3 * FILE_BYTES
    assert bench.rows(range(4 * 10)) == 40  # all of it is in RAM still


def test_namespaces_of_one_model_share_its_budget() -> None:
    bench = Ruled(ram=None, local=40)
    bench.rule(Terms(budget_bytes=4 * FILE_BYTES))
    bench.put(range(4 * 3))
    again = replace(NS, extra="other attention")
    session = bench.store.open_session(again.digest(), again.fields(), BLOCK_TOKENS)
    mine, bench.session = bench.session, session
    bench.try_put(samples.sequence(again, range(4 * 3)))
    bench.session = mine
    assert len(bench.in_tier(0)) <= 4
    assert bench.store.match(again.digest(), [], tokens_to_bytes(range(4)), BLOCK_TOKENS)


def test_a_block_larger_than_the_budget_is_not_written_to_the_disk() -> None:
    bench = Ruled(ram=4, local=40)
    bench.rule(Terms(budget_bytes=FILE_BYTES - 1))
    bench.put(range(4))
    bench.store.run_pending()
    assert held(bench) == 0
    assert bench.rows(range(4)) == 4


def test_what_is_reserved_counts_before_it_is_stored() -> None:
    bench = Ruled(ram=None, local=40)
    bench.rule(Terms(budget_bytes=2 * FILE_BYTES))
    answers = bench.reserve(samples.sequence(NS, range(4 * 4)))
    assert [a.outcome for a in answers] == [
        *[Outcome.RESERVED] * 2,
        *[Outcome.NO_ROOM] * 2,
    ]
    bench.session.close()
    assert bench.state.levels[0].held_bytes == {}


def test_pinned_blocks_are_not_evicted_for_the_models_budget() -> None:
    bench = Ruled(ram=None, local=40)
    pinned = bench.put(range(4 * 3))
    bench.store.pins.pin(pinned[-1].key)
    bench.rule(Terms(budget_bytes=3 * FILE_BYTES))
    bench.store.run_pending()
    (result,) = bench.try_put(samples.sequence(NS, [99]))
    assert not result.stored
    assert bench.in_tier(0) == keys_of(pinned)


def test_the_remote_tier_has_the_same_bound(tmp_path: Path) -> None:
    terms = [Terms()]
    bench = RemoteBench(tmp_path / "remote", decide=lambda _: terms[0])
    bench.put(range(4 * 8))
    bench.store.run_pending()
    bench.put(range(100, 100 + 4 * 8))
    bench.store.run_pending()
    assert len(files(tmp_path / "remote")) > 2
    terms[0] = Terms(budget_bytes=2 * FILE_BYTES)
    bench.store.set_terms(lambda _: terms[0])
    bench.store.run_pending()
    assert len(files(tmp_path / "remote")) <= 2
    bench.store.close(drain_seconds=0)


def test_the_report_names_models_that_are_kept_otherwise() -> None:
    bench = Ruled()
    bench.put(range(8))
    assert bench.store.report().models == []
    bench.store.run_pending()
    bench.rule(Terms(name="s", budget_bytes=9 * FILE_BYTES, ttl_seconds=DAY))
    (model,) = bench.store.report().models
    assert (model.model, model.namespaces) == ("sample", [NAMESPACE])
    assert (model.local_bytes, model.remote_bytes) == (2 * FILE_BYTES, 0)
