"""Sums of days: each thing that was done is counted in its own day, and in no other."""

from __future__ import annotations

import json
import time
from typing import Any

import pytest

from ollama_tiering.sidecar.days import MOST_DAYS, MOST_MODELS, OTHERS, Days, DaySums
from ollama_tiering.sidecar.ledger import Ledger
from tests.unit.sidecar.reports import report

DAY = 86400.0


class Clock:
    def __init__(self, now: float) -> None:
        self.now = now

    def __call__(self) -> float:
        return self.now


def noon() -> Clock:
    return Clock(time.mktime((2026, 11, 27, 12, 0, 0, 0, 0, -1)))


def sums(days: Days) -> dict[tuple[str, str], DaySums]:
    return {(date, model): one for date, model, one in days.last()}


@pytest.mark.parametrize("zone", ["UTC", "Pacific/Auckland", "America/Los_Angeles"])
def test_midnight_of_the_calendar_parts_days(zone: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TZ", zone)
    time.tzset()
    try:
        midnight = time.mktime((2026, 11, 27, 0, 0, 0, 0, 0, -1))
        days = Days(clock := Clock(0.0))
        for after in (-1, -0.5, 0, 1):
            clock.now = midnight + after
            days.book("m", DaySums(requests=1))
        found = {date: one.requests for (date, _), one in sums(days).items()}
        assert found == {"2026-11-26": 2, "2026-11-27": 2}
    finally:
        monkeypatch.undo()
        time.tzset()


def test_what_grew_is_booked_where_it_grew_with_what_it_saved() -> None:
    ledger = Ledger(clock := noon())
    measured = {"prefill_tokens": 1000, "prefill_seconds": 10.0}
    ledger.book(report(1, **measured))
    clock.now += DAY
    ledger.book(report(3, restored=500, restore_seconds=2.0, **measured))
    first, second = (one for _, _, one in ledger.days.last())
    assert (first.requests, first.restored_tokens, first.saved_seconds) == (1, 0, 0.0)
    assert (second.requests, second.restored_tokens) == (2, 500)
    assert second.saved_seconds == pytest.approx(500 / 100 - 2)
    parts = second.memory_tokens + second.restored_tokens + second.recomputed_tokens
    assert parts == second.prompt_tokens


def test_before_a_speed_is_measured_nothing_is_counted_as_saved() -> None:
    ledger = Ledger()
    ledger.book(report(2, restored=500, restore_seconds=2.0, prefill_tokens=0, prefill_seconds=0.0))
    [(_, _, one)] = ledger.days.last()
    assert (one.restored_tokens, one.saved_seconds) == (500, 0.0)


def test_days_and_models_are_bounded() -> None:
    days = Days(clock := noon())
    clock.now -= DAY * (MOST_DAYS + 5)
    for _ in range(MOST_DAYS + 5):
        clock.now += DAY
        days.book("m", DaySums(requests=1))
    for model in range(MOST_MODELS + 3):
        days.book(f"m{model}", DaySums(requests=1))
    found = sums(days)
    assert len({date for date, _ in found}) == MOST_DAYS
    assert found["2026-11-27", OTHERS].requests == 3 + 1  # "m" has a place, too
    assert [date for date, _, _ in days.last(1)] == ["2026-11-27"] * (MOST_MODELS + 1)
    assert len({date for date, _, _ in days.last(7)}) == 7


def test_a_file_gives_back_what_was_written_and_an_older_one_none() -> None:
    ledger = Ledger()
    ledger.book(report(3, restored=640))
    again = Ledger()
    again.restore(json.loads(json.dumps(ledger.document())))
    assert sums(again.days) == sums(ledger.days) != {}
    older = ledger.document()
    del older["days"]
    again.restore(older)
    assert not sums(again.days)


def test_later_sums_lie_beside_the_rows_that_older_versions_read() -> None:
    ledger = Ledger(noon())
    ledger.book(report(3))
    ledger.book_today("m", DaySums(written_bytes=7, partings=2))
    document = json.loads(json.dumps(ledger.document()))
    assert {len(row) for models in document["days"].values() for row in models.values()} == {7}
    assert document["days_more"]["2026-11-27"]["m"] == [7, 2]
    again = Ledger(noon())
    again.restore(document)
    assert sums(again.days) == sums(ledger.days)
    assert sums(again.days)["2026-11-27", "m"] == DaySums(written_bytes=7, partings=2)


def test_of_an_older_file_they_are_0_and_what_a_newer_one_has_more_is_passed_over() -> None:
    ledger = Ledger(noon())
    ledger.book_today("m", DaySums(requests=1, written_bytes=7, partings=2))
    document = ledger.document()
    again = Ledger(noon())
    again.restore({name: table for name, table in document.items() if name != "days_more"})
    assert sums(again.days)["2026-11-27", "m"] == DaySums(requests=1)
    again.restore(document | {"days_more": {"2026-11-27": {"m": [7]}}})
    assert sums(again.days)["2026-11-27", "m"] == DaySums(requests=1, written_bytes=7)
    again.restore(document | {"days_more": {"2026-11-27": {"m": [7, 2, 9]}}})
    assert sums(again.days)["2026-11-27", "m"] == DaySums(requests=1, written_bytes=7, partings=2)


@pytest.mark.parametrize("more", [[], {"2026-11-27": []}, {"2026-11-27": {"m": [-1, 0]}}, 3])
def test_what_are_no_later_sums_changes_nothing(more: Any) -> None:
    ledger = Ledger(noon())
    ledger.book_today("m", DaySums(requests=1, written_bytes=7))
    before = ledger.document()
    with pytest.raises(ValueError, match=r"."):
        ledger.restore(before | {"days_more": more})
    assert ledger.document() == before


def test_what_no_runner_reports_is_written_to_the_file_too() -> None:
    ledger = Ledger(noon())
    before = ledger.changes
    ledger.book_today("/models/m", DaySums(written_bytes=7))
    assert ledger.changes > before
    assert list(sums(ledger.days)) == [("2026-11-27", "m")]


@pytest.mark.parametrize(
    "days",
    [
        [],
        {"yesterday": {}},
        {"2026-11-27": []},
        {"2026-11-27": {"m": [1]}},
        {"2026-11-27": {"m": [-1, 0, 0, 0, 0, 0.0, 0.0]}},
        {"2026-11-27": {"m": [1.5, 0, 0, 0, 0, 0.0, 0.0]}},
        {"2026-11-27": {"m": [1, 0, 0, 0, 0, 0.0, float("inf")]}},
        {"2026-11-27": {"m": [True, 0, 0, 0, 0, 0.0, 0.0]}},
        {"2026-11-27": {"m": [1 << 60, 0, 0, 0, 0, 0.0, 0.0]}},
        {"2026-11-27": {"m" * 200: [1, 0, 0, 0, 0, 0.0, 0.0]}},
    ],
)
def test_what_are_no_sums_of_days_changes_nothing(days: Any) -> None:
    ledger = Ledger()
    ledger.book(report(3))
    before = ledger.document()
    with pytest.raises(ValueError, match=r"."):
        ledger.restore(before | {"days": days, "models": []})
    assert ledger.document() == before
