"""What is written to the disk: booked to days and models, and summed up of days that are over."""

from __future__ import annotations

import time

from ollama_tiering.sidecar.days import DaySums
from ollama_tiering.sidecar.ledger import Ledger
from ollama_tiering.sidecar.wear import Wear
from tests.unit.store.support import FILE_BYTES, NAMESPACE, NS, Bench

DAY = 86400.0


class Clock:
    def __init__(self) -> None:
        self.now = time.mktime((2026, 11, 20, 12, 0, 0, 0, 0, -1))

    def __call__(self) -> float:
        return self.now


def written(ledger: Ledger) -> dict[tuple[str, str], int]:
    return {(date, model): sums.written_bytes for date, model, sums in ledger.days.last()}


def test_each_block_is_booked_once_when_it_lies_on_the_disk() -> None:
    bench, ledger = Bench(), Ledger(clock := Clock())
    wear = Wear(bench.store, ledger)
    bench.put(range(12))
    wear.book()
    assert written(ledger) == {}  # in RAM
    bench.store.run_pending()
    wear.book()
    wear.book()
    clock.now += DAY
    bench.put([50])
    bench.store.run_pending()
    wear.book()
    model = bench.state.terms.model(NAMESPACE)
    assert written(ledger) == {
        ("2026-11-20", model): 3 * FILE_BYTES,
        ("2026-11-21", model): FILE_BYTES,
    }


def test_what_a_client_writes_to_the_disk_itself_counts_by_its_model() -> None:
    bench, ledger = Bench(ram=None, local=8), Ledger(Clock())
    bench.state.terms.learn_described(NAMESPACE, NS.fields())
    bench.put(range(8))
    Wear(bench.store, ledger).book()
    assert written(ledger) == {("2026-11-20", NS.model): 2 * FILE_BYTES}


def test_a_day_that_is_not_over_is_in_no_rate() -> None:
    bench, ledger = Bench(), Ledger(clock := Clock())
    wear = Wear(bench.store, ledger)
    assert wear.message().days == 0
    ledger.book_today("m", DaySums(requests=4, written_bytes=900))
    assert wear.message().days == 0
    clock.now += 3 * DAY
    ledger.book_today("m", DaySums(requests=100, written_bytes=5000))
    found = wear.message()
    assert (found.days, found.written_bytes, found.requests) == (3, 900, 4)
    ledger.book_today("other", DaySums(written_bytes=1))
    clock.now += DAY
    found = wear.message()
    assert (found.days, found.written_bytes, found.requests) == (4, 5901, 104)


def test_days_before_anything_was_written_and_long_ago_are_in_no_rate() -> None:
    bench, ledger = Bench(), Ledger(clock := Clock())
    wear = Wear(bench.store, ledger)
    ledger.book_today("m", DaySums(requests=9))
    clock.now += 2 * DAY
    ledger.book_today("m", DaySums(requests=1, written_bytes=10))
    clock.now += DAY
    found = wear.message()
    assert (found.days, found.written_bytes, found.requests) == (1, 10, 1)
    clock.now += 40 * DAY
    assert wear.message().days == 0
