"""The gate of an engine follows what it measured, and its counts add up."""

from __future__ import annotations

from dataclasses import replace

import pytest

from ollama_tiering.protocol.engine.messages import EngineFinished, GateMode
from ollama_tiering.sidecar.engine.account import EngineAccount, EngineAccounts
from ollama_tiering.sidecar.engine.identity import identity_of
from ollama_tiering.sidecar.ledger import Counts
from ollama_tiering.sidecar.policy.gate import DEFAULT_COPY_RATE
from ollama_tiering.store.block.pb import block_store_pb2 as pb
from ollama_tiering.store.errors import InvalidBlock
from tests.contract.fake_engine import hello

IDENTITY = identity_of(hello())
COMPUTED = EngineFinished(
    1000, 0, 0, pb.SHORTFALL_NOTHING_STORED, 0, 1000, 0, 0, 1.0, 0.0, 0.0, 0.0
)
RESTORED = EngineFinished(
    1000, 100, 800, pb.SHORTFALL_ENDS, 900, 100, 3, 1 << 30, 0.1, 0.01, 0.02, 0.5
)


def runner() -> EngineAccount:
    return EngineAccount(4711, IDENTITY, 64)


def test_it_reports_which_attention_computes() -> None:
    exact = identity_of(hello(fields={"attention": "exact 2 (avx512)"}))
    assert EngineAccount(4711, exact, 64).report().cpu_attention == "exact 2 (avx512)"
    assert runner().report().cpu_attention == ""


def test_as_long_as_no_prefill_was_measured_it_restores() -> None:
    assert runner().restore_pays(GateMode.MEASURED, 1, 1 << 40, 1e9)


def test_restoring_must_be_faster_than_computing() -> None:
    one = runner()
    one.finished(COMPUTED)  # 1,000 tokens a second
    half_second = int(DEFAULT_COPY_RATE / 2)
    assert one.restore_pays(GateMode.MEASURED, 1000, half_second, 0.4)
    assert not one.restore_pays(GateMode.MEASURED, 1000, half_second, 0.6)
    assert one.restore_pays(GateMode.RESTORE, 1000, half_second, 0.6)
    assert one.report().skipped_by_gate == 1


def test_the_speed_of_copying_is_measured_without_what_the_tier_took() -> None:
    one = runner()
    one.finished(COMPUTED)
    slow = replace(RESTORED, restored_bytes=10**9, fetch_seconds=10.0, copy_seconds=1.0)
    # The tier was expected to take all of the fetch: 1 GB/s.
    one.finished(replace(slow, expected_ms=10_000))
    assert one.restore_pays(GateMode.MEASURED, 1000, 9 * 10**8, 0.0)
    assert not one.restore_pays(GateMode.MEASURED, 1000, 11 * 10**8, 0.0)


def test_what_is_never_tried_is_tried_again_some_day() -> None:
    one = runner()
    one.finished(COMPUTED)
    one.finished(replace(RESTORED, restored_bytes=10**6, copy_seconds=1.0))
    tries = 0
    while not one.restore_pays(GateMode.MEASURED, 1000, 10**8, 0.0):
        tries += 1
        assert tries < 100
    assert tries


def test_times_that_no_clock_tells_measure_nothing() -> None:
    one = runner()
    one.finished(replace(COMPUTED, prefill_seconds=5e-324))
    one.finished(COMPUTED)
    one.finished(replace(RESTORED, fetch_seconds=0.0, copy_seconds=5e-324))
    assert one.report().prefill_tokens_per_second == 1000.0
    assert one.restore_pays(GateMode.MEASURED, 1000, int(DEFAULT_COPY_RATE / 2), 0.4)
    assert not one.restore_pays(GateMode.MEASURED, 1000, int(DEFAULT_COPY_RATE / 2), 0.6)


def test_counts_add_up_and_are_sound_for_the_ledger() -> None:
    one = runner()
    one.finished(COMPUTED)
    report = one.finished(RESTORED)
    one.stored(7)
    assert (report.requests, report.prompt_tokens) == (2, 2000)
    assert (report.memory_tokens, report.restored_tokens) == (100, 800)
    assert report.recomputed_tokens == 1100
    assert {s.reason: (s.requests, s.tokens) for s in report.shortfalls} == {
        pb.SHORTFALL_NOTHING_STORED: (1, 1000),
        pb.SHORTFALL_ENDS: (1, 100),
    }
    assert report.last_request.at_token == 900
    assert report.last_restore.tokens == 800
    assert report.failures == 3
    assert (report.prefill_tokens, report.prefill_seconds) == (1000, 1.0)
    assert Counts.of(report).sound
    assert one.report().snapshot_blocks == 7


def test_a_request_that_was_all_there_has_no_reason() -> None:
    one = runner()
    report = one.finished(replace(RESTORED, restored_tokens=899, reason=0))
    assert not report.shortfalls


@pytest.mark.parametrize(
    "change",
    [
        {"restored_tokens": 2000},
        {"prefill_seconds": float("nan")},
        {"prefill_seconds": float("inf")},
        {"copy_seconds": -1.0},
        {"restored_bytes": 1 << 62},
        {"reason": 48},
        {"reason": (1 << 32) - 1},
    ],
    ids=str,
)
def test_counts_that_make_no_sense_are_refused_and_change_nothing(change: dict[str, float]) -> None:
    one = runner()
    before = one.report()
    with pytest.raises(InvalidBlock):
        one.finished(replace(RESTORED, **change))  # type: ignore[arg-type]
    assert one.report() == before


def test_connections_of_one_process_share_their_counts_and_others_do_not() -> None:
    reports: list[pb.RunnerReport] = []
    runners = EngineAccounts(reports.append)
    other = identity_of(hello(layers=3))
    first = runners.account(1, IDENTITY, 64)
    assert runners.account(1, IDENTITY, 64) is first
    assert runners.account(2, IDENTITY, 64) is not first
    assert runners.account(1, other, 64) is not first
    assert [report.pid for report in reports] == [1, 2, 1]
    for pid in range(10, 10 + EngineAccounts.MOST):
        runners.account(pid, IDENTITY, 64)
    assert runners.account(1, IDENTITY, 64) is not first
