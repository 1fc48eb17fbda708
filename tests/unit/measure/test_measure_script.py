"""scripts/measure.py and the index it writes: all records are in it, with the commands it runs."""

from __future__ import annotations

import re
import subprocess
import sys
from dataclasses import replace
from importlib.util import find_spec
from pathlib import Path

import pytest

from measure.attention.__main__ import attention
from measure.overhead import overhead
from measure.peers.__main__ import peers
from measure.store.__main__ import store
from ollama_tiering.cli.bench import bench
from scripts import measure
from scripts.measure import RECORDS, Record

CLICK = (attention, overhead, peers, store)
FOLDER = measure.ROOT / measure.FOLDER


def commit(root: Path) -> None:
    for command in (
        ["init", "-q"],
        ["add", "."],
        ["-c", "user.name=n", "-c", "user.email=e", "commit", "-qm", "first"],
    ):
        subprocess.run(["git", *command], cwd=root, check=True)


@pytest.fixture
def root(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A checkout of two records: one script writes a file, the other fails."""
    (tmp_path / measure.FOLDER).mkdir(parents=True)
    (tmp_path / "scripts").mkdir()
    write = "import sys; open(sys.argv[-1], 'w').write('- Measured: 2026-01-02, commit abc\\n')"
    (tmp_path / "scripts/good.py").write_text(write)
    (tmp_path / "scripts/bad.py").write_text("raise SystemExit(3)")
    commit(tmp_path)
    records = (
        Record("bad.md", "w", "a", "scripts/bad.py", 1),
        Record("good.md", "w", "a", "scripts/good.py", 2),
        Record("lacking.md", "w", "a", "scripts/good.py", 4, needs="build/none.npz"),
    )
    monkeypatch.setattr(measure, "ROOT", tmp_path)
    monkeypatch.setattr(measure, "RECORDS", records)
    return tmp_path


def run(monkeypatch: pytest.MonkeyPatch, *arguments: str) -> int:
    monkeypatch.setattr(sys, "argv", ["measure.py", *arguments])
    return measure.main()


def test_the_index_is_what_the_records_say() -> None:
    found = (FOLDER / "README.md").read_text(encoding="utf-8")
    assert found == measure.index(), "run scripts/measure.py --index"


def test_every_record_and_every_plot_belongs_to_it() -> None:
    listed = {record.file for record in RECORDS} | {"README.md"}
    assert {path.name for path in FOLDER.glob("*.md")} <= listed
    texts = [path.read_text(encoding="utf-8") for path in FOLDER.glob("*.md")]
    shown = {name for text in texts for name in re.findall(r"\]\(([^)]+\.svg)\)", text)}
    assert {path.name for path in FOLDER.glob("*.svg")} == shown


@pytest.mark.parametrize("record", RECORDS, ids=lambda record: record.file)
def test_every_command_is_one_that_is_there(record: Record) -> None:
    program, *arguments = record.command.split()
    command = None
    if program == "tiering":
        assert arguments[0] == "bench"
        command = bench.commands[arguments[1]]
    elif program == "python":
        assert arguments[0] == "-m"
        command = {f"measure.{one.name}": one for one in CLICK}.get(arguments[1])
        assert find_spec(arguments[1])
    if command:
        with command.make_context(arguments[1], arguments[2:]):  # parsed, not run
            pass
    elif program != "python":
        assert (measure.ROOT / program).is_file() == (not record.settled)


def test_a_tree_with_changes_is_refused(
    root: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (root / "scripts/new.py").touch()
    assert run(monkeypatch) == 1
    assert "scripts/new.py" in capsys.readouterr().out
    assert not (root / measure.FOLDER / "good.md").exists()


def test_all_run_one_fails_one_lacks_something_and_the_index_follows(
    root: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    assert run(monkeypatch) == 1
    told = capfd.readouterr().out
    assert "3 records, about 7 minutes" in told
    assert "FAILED: bad.md" in told
    assert "left out: lacking.md" in told
    index = (root / measure.FOLDER / "README.md").read_text(encoding="utf-8")
    assert "| 2026-01-02, abc; by an older command |" in index  # it names no command
    assert index.count("| not yet |") == 2
    # What the first run wrote is no change that stops the next one.
    assert run(monkeypatch, "--only", "good.md") == 0


def test_a_long_one_is_measured_only_when_it_is_asked_for(
    root: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    one = Record("long.md", "w", "a", "scripts/good.py", 25, long=True)
    monkeypatch.setattr(measure, "RECORDS", (*measure.RECORDS, one))
    for arguments, listed in (((), False), (("--long",), True), (("--only", "long.md"), True)):
        assert run(monkeypatch, "--list", *arguments) == 0
        assert ("long.md" in capsys.readouterr().out) is listed
    assert "| long.md |" in measure.index()


def test_a_settled_one_is_in_the_index_and_is_not_measured(
    root: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(
        measure, "RECORDS", (Record("old.md", "w", "a", "scripts/gone.py", 1, settled="abc"),)
    )
    assert run(monkeypatch) == 0
    assert run(monkeypatch, "--only", "old.md") == 0
    assert "left out: old.md, commit abc has its program" in capfd.readouterr().out
    assert "| `gone.py` of abc |" in measure.index()


def test_a_record_of_this_very_command_is_no_older_one(root: Path) -> None:
    record = Record("good.md", "w", "a", "scripts/good.py", 2)
    text = f"- Measured: 2026-01-02, commit abc with changes, O\n- Command: `{record.command} -q`\n"
    record.path.write_text(text)
    assert record.measured() == "2026-01-02, abc with changes"
    moved = replace(record, program="python -m measure.store --only index")
    record.path.write_text(text.replace("scripts/good.py", "tiering bench store --only index"))
    assert moved.measured() == "2026-01-02, abc with changes"
    record.path.write_text(text.replace("good.py", "other.py"))
    assert record.measured() == "2026-01-02, abc with changes; by an older command"


def test_list_says_what_it_takes_and_starts_nothing(
    root: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(monkeypatch, "--list") == 0
    assert "2 min  scripts/good.py --out docs/measurements/good.md" in capsys.readouterr().out
    assert not (root / measure.FOLDER / "README.md").exists()
