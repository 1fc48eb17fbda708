"""Over three days each test that waits its turn runs once."""

from __future__ import annotations

import os
import re
import subprocess
from pathlib import Path

import pytest

from tests import turns

REPOSITORY = Path(__file__).parents[2]
FILES = sorted({**turns.TURNS, **turns.ONE_CASE})
SOME, OTHER = sorted(turns.TURNS)[:2]


@pytest.fixture(autouse=True)
def no_day(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in (turns.ENV_DAY, turns.ENV_TOUCHED):
        monkeypatch.delenv(name, raising=False)


def days_of(nodeid: str, monkeypatch: pytest.MonkeyPatch) -> list[int]:
    days = []
    for day in range(20_000, 20_000 + turns.DAYS):
        monkeypatch.setenv(turns.ENV_DAY, str(day))
        days += [] if turns.waits(nodeid) else [day]
    return days


def test_each_runs_on_one_day_and_without_a_day_all_do(monkeypatch: pytest.MonkeyPatch) -> None:
    names = [f"{file}::test_{number}" for file in turns.TURNS for number in range(9)]
    days = [days_of(name, monkeypatch) for name in names]
    assert all(len(one) == 1 for one in days)
    assert len({one[0] for one in days}) == turns.DAYS
    monkeypatch.delenv(turns.ENV_DAY)
    assert not any(turns.waits(name) for name in names)


def test_all_others_run_every_day(monkeypatch: pytest.MonkeyPatch) -> None:
    assert len(days_of("tests/engine/test_restore.py::test_it", monkeypatch)) == turns.DAYS


def test_what_the_change_touches_runs_every_day(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(turns.ENV_TOUCHED, f"tests/x.py\n{SOME}")
    assert len(days_of(f"{SOME}::test_it", monkeypatch)) == turns.DAYS
    assert len(days_of(f"{OTHER}::test_it", monkeypatch)) == 1


@pytest.mark.parametrize("file", turns.ONE_CASE)
def test_one_case_runs_unless_touched(file: str, monkeypatch: pytest.MonkeyPatch) -> None:
    assert not turns.in_part(file)
    monkeypatch.setenv(turns.ENV_DAY, "1")
    assert turns.in_part(file)
    monkeypatch.setenv(turns.ENV_TOUCHED, f"{SOME}\n{file}")
    assert not turns.in_part(file)
    assert not turns.waits(f"{file}::test_it")


@pytest.mark.parametrize("file", FILES)
def test_the_files_are_there(file: str) -> None:
    assert (REPOSITORY / file).is_file()


@pytest.mark.parametrize("file", sorted(turns.ONE_CASE))
def test_a_file_of_one_case_asks_for_itself(file: str) -> None:
    assert f'FILE = "{file}"' in (REPOSITORY / file).read_text(encoding="utf-8")


def test_the_script_gives_the_day_and_what_is_touched() -> None:
    script = (REPOSITORY / "scripts/test").read_text(encoding="utf-8")
    assert re.search(rf"export {turns.ENV_DAY}=", script)
    assert re.search(rf"\b{turns.ENV_TOUCHED}=\$\(.*tests\.touched\)", script)
    assert re.search(rf"export {turns.ENV_TOUCHED}\b", script)


@pytest.mark.parametrize("given", [["all"], ["quick", "nightly"], ["-x"]], ids=str)
def test_the_script_refuses_what_it_does_not_know(given: list[str]) -> None:
    """Nobody is to believe that all tests ran."""
    done = subprocess.run(
        [REPOSITORY / "scripts/test", *given],
        env={**os.environ, "TIERING_PYTHON": "/nowhere"},
        capture_output=True,
        text=True,
        check=False,
        timeout=30,
    )
    assert done.returncode == 2
    assert "quick" in done.stderr
    assert done.stdout == ""
