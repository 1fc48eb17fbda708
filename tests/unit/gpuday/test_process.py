"""A step's process: what it says is its outcome, its time limit ends it, and a fault is its own."""

from __future__ import annotations

import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import psutil
import pytest

from scripts.gpuday import command, machine, process
from scripts.gpuday.day import ROOT, Day, steps_of
from scripts.gpuday.process import launch
from scripts.gpuday.steps import DONE, FAILED, LACKING, TIMEOUT, Outcome, State, Step


@pytest.fixture
def day(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Day:
    monkeypatch.setattr(process, "MODULE", "tests.unit.gpuday.fake_process")
    monkeypatch.setattr(process, "GRACE_S", 1.0)
    made = Day(tmp_path / "out", tmp_path / "work", tmp_path / "pack")
    made.write()
    return made


def begin(day: Day, name: str, limit_s: float = 30) -> Outcome:
    return launch(day, Step(name, name, limit_s, 1), limit_s)


def test_the_outcome_is_what_the_step_wrote(day: Day) -> None:
    outcome = begin(day, "well")
    assert (outcome.status, outcome.lines) == (DONE, ["a line"])
    assert outcome.seconds > 0
    assert (day.work / "well.log").read_text() == "all is well\n"


def test_a_fault_is_the_steps_own_and_its_last_words_are_kept(day: Day) -> None:
    outcome = begin(day, "fault")
    assert outcome.status == FAILED
    assert "exit code 134: CUDA error: an illegal memory access" in outcome.why


def test_a_step_whose_time_is_over_is_ended(day: Day) -> None:
    outcome = begin(day, "polite", limit_s=1.0)
    assert (outcome.status, outcome.why) == (TIMEOUT, "not ended within 1 s")
    assert "cleaned up" in outcome.lines


def test_a_step_that_does_not_listen_is_killed_with_what_it_started(day: Day) -> None:
    assert begin(day, "stuck", limit_s=1.5).status == TIMEOUT
    child = int((day.work / "child").read_text())
    zombie = psutil.STATUS_ZOMBIE
    _wait(lambda: not psutil.pid_exists(child) or psutil.Process(child).status() == zombie)


STARTER = """
import sys
from pathlib import Path
from scripts.gpuday import process
from scripts.gpuday.day import Day
from scripts.gpuday.steps import Step
process.MODULE = "tests.unit.gpuday.fake_process"
process.launch(Day.read(Path(sys.argv[1])), Step("polite", "", 60, 1), 60)
"""


def test_a_step_ends_with_the_command_that_was_killed(day: Day) -> None:
    """Else it would hold the GPU while the next command goes on."""
    command = subprocess.Popen([sys.executable, "-c", STARTER, day.work], cwd=ROOT)
    try:
        _wait(lambda: (day.work / "pid").exists() and (day.work / "pid").read_text())
    finally:
        command.kill()
        command.wait()
    step = int((day.work / "pid").read_text())
    _wait(lambda: not psutil.pid_exists(step))
    assert "cleaned up" in (day.work / "polite.log").read_text()


def _wait(done: Callable[[], object]) -> None:
    deadline = time.monotonic() + 20
    while not done():
        assert time.monotonic() < deadline
        time.sleep(0.05)


def test_a_result_of_an_earlier_run_is_not_this_ones(day: Day) -> None:
    begin(day, "well")
    (day.work / "well.json").rename(day.work / "fault.json")
    assert begin(day, "fault").status == FAILED


def test_a_day_is_read_as_it_was_written(tmp_path: Path) -> None:
    day = Day(tmp_path, tmp_path / "work", tmp_path / "pack", tmp_path / "ollama", True, True)
    day.write()
    assert Day.read(tmp_path / "work") == day


def test_each_step_needs_steps_before_it(tmp_path: Path) -> None:
    todo = steps_of(Day(tmp_path, tmp_path, tmp_path))
    names = [step.name for step in todo]
    for step in todo:
        assert all(names.index(name) < names.index(step.name) for name in step.needs)
        assert 0 < step.least_s <= step.limit_s < 600


def test_without_a_gpu_each_step_says_so(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The whole command, its steps real."""
    monkeypatch.setenv("PATH", "/nowhere")  # no nvidia-smi, whatever this machine has
    folders = [f"--{name}={tmp_path / name}" for name in ("out", "work", "pack")]
    assert command.main(["run", *folders]) == 1
    state = State.read(tmp_path / "out/state.json")
    assert state.is_done("look")
    others = {name: one for name, one in state.outcomes.items() if name not in ("look", "unpack")}
    assert len(others) == 14
    for name, outcome in others.items():
        assert outcome.status == LACKING, name
        assert outcome.why == "no GPU: nvidia-smi does not answer"
    assert "scripts/gpu_day pack" in state.outcomes["unpack"].cure
    text = (tmp_path / "out/report.md").read_text()
    assert text.count("open: not measured") == 6
    assert "holds" not in text
    assert "stock: not possible: no GPU" in capsys.readouterr().out


def test_figures_of_another_gpu_are_forgotten(tmp_path: Path) -> None:
    facts = machine.look(tmp_path, ask=lambda *_: "B, 1, 80000 MiB, 9.0, 5\n")
    look = Outcome(DONE, figures=facts)
    state = State({"gpu": "A (1)"}, {"look": look, "stock": Outcome(DONE)})
    command._note_machine(state, look)
    assert set(state.outcomes) == {"look"}
    state.outcomes["stock"] = Outcome(DONE)
    command._note_machine(state, look)
    assert state.is_done("stock")


def test_a_checkout_without_git_is_named_by_the_pack(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    day = Day(tmp_path / "out", tmp_path / "work", tmp_path / "pack")
    monkeypatch.setattr(command, "_commit", lambda: "")
    assert command._when(day).endswith("commit not told (no git here)")
    monkeypatch.setattr(command.pack, "read_about", lambda _: {"commit": "abc1234"})
    assert command._when(day).endswith("commit abc1234")


def test_an_unknown_step_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        command.main(["run", "--work", str(tmp_path), "--again", "dance"])
    assert "no step dance" in capsys.readouterr().err
