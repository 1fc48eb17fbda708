"""Over three days each test that waits its turn runs once."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests import turns

REPOSITORY = Path(__file__).parents[2]


def days_of(nodeid: str, monkeypatch: pytest.MonkeyPatch) -> list[int]:
    days = []
    for day in range(20_000, 20_000 + turns.DAYS):
        monkeypatch.setenv(turns.ENV_DAY, str(day))
        days += [] if turns.waits(nodeid) else [day]
    return days


def test_each_runs_on_one_day_and_without_a_day_all_do(monkeypatch: pytest.MonkeyPatch) -> None:
    names = [f"{file}::test_{number}" for file in turns.FILES for number in range(9)]
    days = [days_of(name, monkeypatch) for name in names]
    assert all(len(one) == 1 for one in days)
    assert len({one[0] for one in days}) == turns.DAYS
    monkeypatch.delenv(turns.ENV_DAY)
    assert not any(turns.waits(name) for name in names)


def test_all_others_run_every_day(monkeypatch: pytest.MonkeyPatch) -> None:
    assert len(days_of("tests/engine/test_restore.py::test_it", monkeypatch)) == turns.DAYS


@pytest.mark.parametrize("file", sorted(turns.FILES))
def test_the_files_are_there(file: str) -> None:
    assert (REPOSITORY / file).is_file()
