"""What a record says of where it comes from."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest

from ollama_tiering.bench import machine
from ollama_tiering.bench.machine import Machine
from ollama_tiering.bench.table import Table

HERE = Machine("cpu", 2, "8 GiB", "Linux", "2026-01-01", "abc", 0.25, 1.75)


@pytest.fixture
def checkout(tmp_path: Path) -> Path:
    for folder in ("patches", "docs/measurements"):
        (tmp_path / folder).mkdir(parents=True)
    (tmp_path / "code.py").write_text("1")
    (tmp_path / "docs/measurements/old.md").write_text("1")
    for command in (
        ["init", "-q"],
        ["add", "."],
        ["-c", "user.name=n", "-c", "user.email=e", "commit", "-qm", "first"],
    ):
        subprocess.run(["git", *command], cwd=tmp_path, check=True)
    return tmp_path


def test_the_load_stands_in_every_record_beside_the_cores(monkeypatch: pytest.MonkeyPatch) -> None:
    table = Table("t", ["a"], [["1"]])
    text = table.markdown(HERE, "Ollama 0.16.3", "tiering bench")
    assert "0.2 at the start, 1.8 at the end" in text
    assert "2 cores" in text
    assert "2026-01-01, commit abc" in text
    loads = iter((0.5, 9.0))
    monkeypatch.setattr(machine, "load_average", lambda: next(loads))
    made = machine.this_machine(machine.begin())
    assert (made.load_at_start, made.load_at_end) == (0.5, 9.0)
    assert made.as_json()["load_at_start"] == 0.5


def test_code_that_changes_while_it_is_measured_is_named(
    checkout: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(machine, "CHECKOUT", checkout)
    began = machine.begin()
    assert machine.this_machine(began).code == began.code
    (checkout / "code.py").write_text("2")
    changed = machine.this_machine(began).code
    assert changed == f"{began.code} and then {began.code} with changes"


def test_a_changed_tree_is_named_and_so_is_a_file_that_git_does_not_know(checkout: Path) -> None:
    clean = machine._code(checkout)
    assert "changes" not in clean
    (checkout / "new.py").touch()
    assert machine._code(checkout) == f"{clean} with changes"
    (checkout / "new.py").unlink()
    (checkout / "code.py").write_text("2")
    assert machine._code(checkout) == f"{clean} with changes"


def test_records_written_before_are_no_change_of_the_code(checkout: Path) -> None:
    (checkout / "docs/measurements/old.md").write_text("2")
    (checkout / "docs/measurements/new.md").touch()
    assert "changes" not in machine._code(checkout)
