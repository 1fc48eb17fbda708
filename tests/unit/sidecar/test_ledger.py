"""The ledger: what grew since a runner's last report is booked once, whoever reports it."""

from __future__ import annotations

import json
import math
from typing import Any

import pytest

from ollama_tiering.sidecar import ledger as module
from ollama_tiering.sidecar.ledger import MAX_MODELS, MAX_RUNNERS, Counts, Ledger
from ollama_tiering.store.block.pb import block_store_pb2 as pb
from tests.unit.sidecar.ollama_models import blob
from tests.unit.sidecar.reports import NAMESPACE, OTHER, report


class Clock:
    def __init__(self) -> None:
        self.now = 5000.0

    def __call__(self) -> float:
        return self.now


def booked(*reports: pb.RunnerReport) -> Ledger:
    ledger = Ledger(Clock())
    for one in reports:
        ledger.book(one)
    return ledger


def counts(ledger: Ledger, namespace: bytes = NAMESPACE) -> Counts:
    return ledger.entries()[namespace].counts


def times(ledger: Ledger) -> tuple[float, float]:
    return ledger.entries()[NAMESPACE].since, ledger.entries()[NAMESPACE].last_used


def test_a_runner_reports_sums_and_only_what_is_new_is_booked() -> None:
    ledger = booked(report(1), report(3, restored=640), report(3, restored=640))
    assert counts(ledger) == Counts(3, 450 + 640, 300, 640, 150)


def test_each_request_that_ends_is_a_line_of_the_log(caplog: pytest.LogCaptureFixture) -> None:
    last = pb.LastRequest(shortfall=pb.SHORTFALL_ENDS)
    with caplog.at_level("INFO", logger=module.__name__):
        booked(report(1, last_request=last), report(1), report(3, restored=640, last_request=last))
    one, two = (record.getMessage() for record in caplog.records)
    assert one.startswith("1 request ended: model=")
    assert one.endswith("computed=50 why=ends")
    assert two.startswith("2 requests ended: model=")
    assert "prompt=940 in_memory=200 restored=640 computed=100 why=ends" in two


def test_a_new_runner_is_added_to_the_ones_before() -> None:
    ledger = booked(report(3), report(2, pid=8, started_unix_seconds=2000), report(4))
    assert counts(ledger).requests == 4 + 2


def test_a_process_id_that_is_used_again_is_another_runner() -> None:
    ledger = booked(report(3), report(3, started_unix_seconds=1001))
    assert counts(ledger).requests == 6
    ledger.book(report(5, started_unix_seconds=1001))
    assert counts(ledger).requests == 8


def test_one_that_does_not_say_when_it_began_is_told_by_sums_that_fall() -> None:
    old = {"started_unix_seconds": 0}
    ledger = booked(report(3, **old), report(5, **old), report(1, **old), report(2, **old))
    assert counts(ledger).requests == 5 + 2


def test_reports_that_overtake_each_other_are_booked_once() -> None:
    ledger = booked(report(5, restored=10), report(4, restored=10), report(6, restored=10))
    assert counts(ledger) == Counts(6, 910, 600, 10, 300)


def test_the_sums_of_time_are_booked_too() -> None:
    more = {"prefill_tokens": 600, "prefill_seconds": 2.5, "restore_seconds": 0.25}
    ledger = booked(report(1), report(2, **more), report(3, **more), report(3, pid=9, **more))
    found = counts(ledger)
    assert (found.prefill_tokens, found.prefill_seconds, found.restore_seconds) == (1200, 5, 0.5)


def test_models_are_kept_apart_and_named() -> None:
    ledger = booked(report(1), report(2, pid=8, namespace=OTHER, model=f"/models/{blob(2)}"))
    assert (counts(ledger).requests, counts(ledger, OTHER).requests) == (1, 2)
    assert [one.model for one in ledger.entries().values()] == [blob(1), blob(2)]


@pytest.mark.parametrize(
    "wrong",
    [
        {"prompt_tokens": 151},
        {"recomputed_tokens": 51},
        {"prefill_tokens": 1 << 60},
        {"prefill_seconds": math.nan},
        {"restore_seconds": -1.0},
        {"restore_seconds": math.inf},
        {"started_unix_seconds": math.nan},
        {"namespace": b"short"},
        {"tiered": False},
    ],
)
def test_what_does_not_add_up_or_is_no_count_is_not_booked(wrong: dict[str, Any]) -> None:
    ledger = booked(report(1, **wrong))
    assert ledger.entries() == {}
    ledger.book(report(2))
    assert counts(ledger).requests == 2


def test_sums_stay_numbers_that_can_be_sent() -> None:
    huge = {"prefill_tokens": (1 << 53) - 1, "prefill_seconds": 1.0}
    ledger = booked(report(1, **huge), report(1, pid=8, **huge), report(2, **huge))
    assert counts(ledger).prefill_tokens == (1 << 53) - 1
    assert counts(ledger).requests == 2


def test_in_every_state_the_three_counts_add_up() -> None:
    ledger = Ledger(Clock())
    for step in range(40):
        pid = step % 3
        ledger.book(report(step // 3 + 1, restored=step * 7, pid=pid, prompt_tokens=0))  # not sound
        ledger.book(report(step // 3 + 1, restored=step * 7, pid=pid))
        found = counts(ledger)
        parts = found.memory_tokens + found.restored_tokens + found.recomputed_tokens
        assert parts == found.prompt_tokens > 0


def test_time_of_use_follows_the_wall_clock_wherever_it_goes() -> None:
    clock = Clock()
    ledger = Ledger(clock)
    ledger.book(report(1))
    clock.now = 6000
    ledger.book(report(1))  # nothing new: no use
    assert times(ledger) == (5000, 5000)
    ledger.book(report(2))
    assert times(ledger) == (5000, 6000)
    clock.now = 10  # set back
    ledger.book(report(3))
    assert times(ledger) == (5000, 10)
    assert counts(ledger).requests == 3


def test_it_is_bounded_and_what_was_used_longest_ago_goes() -> None:
    ledger = Ledger(Clock())
    first = bytes(32)
    for number in range(MAX_MODELS + 10):
        ledger.book(report(1, pid=number + 1, namespace=number.to_bytes(32, "big")))
        ledger.book(report(number + 2, pid=1, namespace=first))  # stays: it is used all the time
    assert len(ledger.entries()) == MAX_MODELS
    assert counts(ledger, first).requests == MAX_MODELS + 11  # it never went
    assert (1).to_bytes(32, "big") not in ledger.entries()
    assert len(ledger.document()["runners"]) == MAX_RUNNERS
    ledger.book(report(1, namespace=OTHER, model="m" * 9000, engine="e" * 9000))
    assert len(json.dumps(ledger.document())) < 200_000


def test_after_a_restart_it_goes_on_where_it_was() -> None:
    ledger = booked(report(3, restored=64, prefill_tokens=512, prefill_seconds=2.0))
    again = Ledger(Clock())
    again.restore(json.loads(json.dumps(ledger.document())))
    assert again.entries() == ledger.entries()
    again.book(report(4, restored=64, prefill_tokens=512, prefill_seconds=2.0))  # the same runner
    assert counts(again).requests == 4


def _changed(change: Any) -> dict[str, Any]:
    document = booked(report(1)).document()
    change(document)
    return document


@pytest.mark.parametrize(
    "damaged",
    [
        [],
        {},
        None,
        _changed(lambda d: d.update(version=2)),
        _changed(lambda d: d["models"][0].update(namespace="ff")),
        _changed(lambda d: d["models"][0].update(namespace=5)),
        _changed(lambda d: d["models"][0].update(model="m" * 1000)),
        _changed(lambda d: d["models"][0].update(last_used=math.inf)),
        _changed(lambda d: d["models"][0]["counts"].update(prompt_tokens=1)),
        _changed(lambda d: d["models"][0]["counts"].update(requests="1")),
        _changed(lambda d: d["models"][0]["counts"].update(requests=1.5)),
        _changed(lambda d: d["models"][0]["counts"].update(requests=True)),
        _changed(lambda d: d["models"][0]["counts"].update(restore_seconds=math.nan)),
        _changed(lambda d: d["models"][0]["counts"].update(more=1)),
        _changed(lambda d: d["runners"][0].update(pid="x")),
        _changed(lambda d: d["runners"].append(None)),
    ],
)
def test_what_is_not_a_ledger_changes_nothing(damaged: Any) -> None:
    ledger = booked(report(2))
    with pytest.raises(ValueError, match=r".+"):
        ledger.restore(damaged)
    assert counts(ledger).requests == 2


def test_a_file_with_too_much_in_it_is_cut(monkeypatch: pytest.MonkeyPatch) -> None:
    document = booked(report(1), report(1, pid=8, namespace=OTHER)).document()
    monkeypatch.setattr(module, "MAX_MODELS", 1)
    monkeypatch.setattr(module, "MAX_RUNNERS", 1)
    ledger = Ledger()
    ledger.restore(document)
    assert list(ledger.entries()) == [OTHER]
    assert [one["pid"] for one in ledger.document()["runners"]] == [8]
