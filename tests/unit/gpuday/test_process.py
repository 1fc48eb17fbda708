"""A step's process: what it says is its outcome, its time limit ends it, and a fault is its own."""

from __future__ import annotations

import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest

from scripts.gpuday import command, steps
from scripts.gpuday.steps import DONE, FAILED, LACKING, ROOT, TIMEOUT, Day, Outcome, Step

# In the place of a step: its arguments are those of scripts.gpuday.steps.
BEGIN = """
import os, pathlib, signal, subprocess, sys, time
name, work = sys.argv[2], pathlib.Path(sys.argv[3])
note = (work / "pid").write_text
"""
FAKES = {
    "well": """
print("all is well")
(work / "well.json").write_text('{"status": "done", "lines": ["a line"]}')
""",
    "fault": "sys.exit(print('CUDA error: an illegal memory access was encountered') or 134)",
    "polite": """
signal.signal(signal.SIGTERM, lambda *_: sys.exit(print("cleaned up")))
note(str(os.getpid()))
time.sleep(60)
""",
    "stuck": """
signal.signal(signal.SIGTERM, signal.SIG_IGN)
note(str(subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"]).pid))
time.sleep(60)
""",
}


@pytest.fixture
def day(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Day:
    monkeypatch.setattr(steps, "GRACE_S", 1.0)
    made = Day(tmp_path / "out", tmp_path / "work")
    made.write()
    return made


def begin(day: Day, name: str, limit_s: float = 30) -> Outcome:
    program = (sys.executable, "-c", BEGIN + FAKES[name])
    return steps.launch(day, Step(name, "a module", name, limit_s, 1), limit_s, program)


def wait_for_end(day: Day) -> None:
    """Of the process that noted its number."""
    deadline, ended = time.monotonic() + 20, False
    while not ended:
        assert time.monotonic() < deadline
        time.sleep(0.05)
        try:
            noted = psutil.Process(int((day.work / "pid").read_text()))
            ended = noted.status() == psutil.STATUS_ZOMBIE
        except psutil.NoSuchProcess:
            ended = True


def test_the_outcome_is_what_the_step_wrote(day: Day) -> None:
    outcome = begin(day, "well")
    assert (outcome.status, outcome.lines) == (DONE, ["a line"])
    assert outcome.seconds > 0
    assert (day.work / "well.log").read_text() == "all is well\n"


def test_a_fault_is_the_steps_own_and_no_earlier_result_is_its(day: Day) -> None:
    begin(day, "well")
    (day.work / "well.json").rename(day.work / "fault.json")
    outcome = begin(day, "fault")
    assert outcome.status == FAILED
    assert "exit code 134: CUDA error: an illegal memory access" in outcome.why


def test_a_step_whose_time_is_over_is_ended(day: Day) -> None:
    outcome = begin(day, "polite", limit_s=1.0)
    assert (outcome.status, outcome.why) == (TIMEOUT, "not ended within 1 s")
    assert "cleaned up" in outcome.lines


def test_a_step_that_does_not_listen_is_killed_with_what_it_started(day: Day) -> None:
    assert begin(day, "stuck", limit_s=1.5).status == TIMEOUT
    wait_for_end(day)


def test_a_step_ends_with_the_command_that_was_killed(day: Day) -> None:
    """Else it would hold the GPU while the next command goes on."""
    words = "import sys; from pathlib import Path; from tests.unit.gpuday import test_process as t;"
    words += "t.begin(t.Day.read(Path(sys.argv[1])), 'polite')"
    killed = subprocess.Popen([sys.executable, "-c", words, day.work], cwd=ROOT)
    try:
        while not (day.work / "pid").exists() or not (day.work / "pid").read_text():
            assert killed.poll() is None
            time.sleep(0.05)
    finally:
        killed.kill()
        killed.wait()
    wait_for_end(day)
    assert "cleaned up" in (day.work / "polite.log").read_text()


def test_without_a_gpu_each_step_says_so(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The whole command, its steps real."""
    monkeypatch.setenv("PATH", "/nowhere")  # no nvidia-smi, whatever this machine has
    monkeypatch.setattr(command, "PACK", tmp_path)
    assert command.main(["run", f"--out={tmp_path}/out", f"--work={tmp_path}/work"]) == 1
    day = Day.read(tmp_path / "work")
    assert day.out == tmp_path / "out"
    for step in command.STEPS:
        outcome = day.outcomes[step.name]
        assert (outcome.status, outcome.why) == (LACKING, "no GPU: nvidia-smi does not answer")
    text = (tmp_path / "out/report.md").read_text()
    assert text.startswith("# A day with a GPU\n\n- Machine: ")
    assert text.count("open: not measured") == 7
    assert "stock: not possible: no GPU" in capsys.readouterr().out
    assert "===== look" in (tmp_path / "out/steps.log").read_text()


def test_the_same_command_goes_on_where_it_ended(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(command, "PACK", tmp_path)
    begun: list[str] = []

    def fake(day: Day, step: Step, _: float) -> Outcome:
        begun.append(step.name)
        (day.work / f"{step.name}.log").touch()
        return Outcome(DONE, ["a line"], {"rate": 1.5}, {"cold": None})

    monkeypatch.setattr(steps, "launch", fake)
    words = ["run", f"--out={tmp_path}/out", f"--work={tmp_path}/work"]
    assert command.main([*words, "--minutes", "0.45"]) == 1  # not all have the time
    assert begun == ["look"]
    assert command.main(words) == 0
    assert len(begun) == len(command.STEPS)
    assert Day.read(tmp_path / "out").outcomes == Day.read(tmp_path / "work").outcomes


def test_some_steps_are_done_with_what_they_need_and_several_runs_make_one_report(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(command, "PACK", tmp_path)

    def fake(day: Day, step: Step, _: float) -> Outcome:
        (day.work / f"{step.name}.log").touch()
        return Outcome(DONE, [f"{day.out.name} did {step.name}"])

    monkeypatch.setattr(steps, "launch", fake)
    for name, only in ("a", "stock,rates"), ("b", "rates,gate"):
        words = [f"--out={tmp_path}/{name}", f"--work={tmp_path}/work-{name}", f"--only={only}"]
        assert command.main(["run", *words]) == 0
    done = Day.read(tmp_path / "a").outcomes
    assert set(done) == {"look", "library", "model", "csrc", "rates", "stock"}
    capsys.readouterr()
    states = [f"{tmp_path}/{name}/{steps.STATE}" for name in ("a", "b")]
    assert command.main(["report", *states]) == 0
    said = capsys.readouterr().out
    assert "a did stock" in said
    assert "b did rates" in said
    assert "b did gate" in said
    assert "a did rates" not in said
    with pytest.raises(SystemExit):
        command.main(["run", "--only=rate"])
