"""Why prompts were computed, in sums: they add up, stay bounded, and outlive the sidecar."""

from __future__ import annotations

import json
from typing import Any

import pytest

from ollama_tiering.protocol.shortfalls import NAMES, Shortfalls, name
from ollama_tiering.sidecar.ledger import Counts, Ledger
from ollama_tiering.store.block.pb import block_store_pb2 as pb
from tests.unit.sidecar.reports import NAMESPACE, report

NOTHING, ENDS = pb.SHORTFALL_NOTHING_STORED, pb.SHORTFALL_ENDS


def short(**counts: tuple[int, int]) -> dict[str, Any]:
    """Of a report: the reasons by the last part of their name."""
    values = {reason: pb.Shortfall.Value(f"SHORTFALL_{reason}") for reason in counts}
    return {
        "shortfalls": [
            pb.ShortfallCount(reason=values[reason], requests=requests, tokens=tokens)
            for reason, (requests, tokens) in counts.items()
        ]
    }


def booked(*reports: pb.RunnerReport) -> Ledger:
    ledger = Ledger()
    for one in reports:
        ledger.book(one)
    return ledger


def counts(ledger: Ledger) -> Counts:
    return ledger.entries()[NAMESPACE].counts


def reasons(ledger: Ledger) -> dict[int, tuple[int, int]]:
    return dict(counts(ledger).shortfalls.by_reason)


def test_what_is_new_is_booked_over_all_runners() -> None:
    ledger = booked(
        report(1, **short(NOTHING_STORED=(1, 50))),
        report(3, **short(NOTHING_STORED=(2, 90), ENDS=(1, 10))),
        report(2, pid=8, **short(ENDS=(2, 60))),
        report(3, **short(NOTHING_STORED=(2, 90), ENDS=(1, 10))),  # the same once more
    )
    assert reasons(ledger) == {NOTHING: (2, 90), ENDS: (3, 70)}


def test_a_report_that_was_overtaken_is_booked_once() -> None:
    late = report(2, **short(ENDS=(1, 10)))
    ledger = booked(report(2, **short(ENDS=(2, 20))), late)
    assert reasons(ledger) == {ENDS: (2, 20)}
    ledger.book(report(3, **short(ENDS=(3, 30))))
    assert reasons(ledger) == {ENDS: (3, 30)}


def test_a_runner_that_says_no_reasons_is_booked_as_before() -> None:
    ledger = booked(report(1), report(2))
    assert counts(ledger) == Counts(2, 300, 200, 0, 100)
    assert reasons(ledger) == {}


@pytest.mark.parametrize(
    "wrong",
    [
        short(ENDS=(2, 10)),  # more requests than there were
        short(ENDS=(1, 51)),  # more tokens than were computed
        {"shortfalls": [pb.ShortfallCount(reason=48, requests=1, tokens=1)]},  # type: ignore[arg-type]
        {"shortfalls": [pb.ShortfallCount(reason=-1, requests=1, tokens=1)]},  # type: ignore[arg-type]
    ],
)
def test_reasons_that_cannot_be_are_not_booked(wrong: dict[str, Any]) -> None:
    ledger = booked(report(1, **wrong))
    assert ledger.entries() == {}


def test_a_reason_of_a_newer_runner_is_kept_as_it_is() -> None:
    newer = [pb.ShortfallCount(reason=47, requests=1, tokens=7)]  # type: ignore[arg-type]
    ledger = booked(report(1, shortfalls=newer))
    assert reasons(ledger) == {47: (1, 7)}
    assert list(counts(ledger).shortfalls.messages()) == newer
    assert counts(ledger).shortfalls.by_name()["other"] == (1, 7)


def test_they_outlive_the_sidecar_and_are_read_by_an_older_version() -> None:
    ledger = booked(report(2, **short(NOTHING_STORED=(1, 50), ENDS=(1, 10))))
    document = json.loads(json.dumps(ledger.document()))
    again = Ledger()
    again.restore(document)
    assert again.entries() == ledger.entries()
    again.book(report(3, **short(NOTHING_STORED=(2, 90), ENDS=(1, 10))))
    assert reasons(again) == {NOTHING: (2, 90), ENDS: (1, 10)}
    # What an older version takes: sums by these names, and nothing else where they are.
    numbers = {field for field in Counts.__dataclass_fields__ if field != "shortfalls"}
    for one in document["models"] + document["runners"]:
        assert set(one["counts"]) == numbers
        del one["shortfalls"]  # and what it has written
    again.restore(document)
    assert counts(again).requests == 2
    assert reasons(again) == {}


@pytest.mark.parametrize(
    "damaged",
    [[], {"1": 5}, {"1": [1]}, {"1": ["1", 2]}, {"x": [1, 1]}, {"1": [9, 1]}, {"1": [1, -1]}],
)
def test_a_file_with_other_reasons_changes_nothing(damaged: Any) -> None:
    document = booked(report(2)).document()
    document["models"][0]["shortfalls"] = damaged
    ledger = booked(report(1))
    with pytest.raises(ValueError, match=r".+"):
        ledger.restore(document)
    assert counts(ledger).requests == 1


def test_names_are_those_of_the_protocol_and_bounded() -> None:
    assert name(NOTHING) == "nothing_stored"
    assert name(0) == "unspecified"
    assert name(1 << 30) == "other"
    assert len(NAMES) == len(set(NAMES)) == len(pb.Shortfall.values()) + 1
    assert set(Shortfalls().by_name()) == set(NAMES)


def test_sums_of_one_reason_that_is_named_twice() -> None:
    twice = [pb.ShortfallCount(reason=ENDS, requests=1, tokens=n) for n in (3, 4)]
    assert Shortfalls.of(twice).by_reason == {ENDS: (2, 7)}
    less = Shortfalls({ENDS: (1, 7)})
    assert less.has_fallen(Shortfalls.of(twice))
    assert Shortfalls().has_fallen(less)
    assert not less.has_fallen(Shortfalls())
