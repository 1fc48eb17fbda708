from __future__ import annotations

import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from ollama_tiering.errors import MissingTool, ServiceError, TieringError
from ollama_tiering.patchset.lock import locked
from ollama_tiering.patchset.report import Report
from ollama_tiering.patchset.run import run, stream


def test_run_keeps_output_and_status() -> None:
    done = run("sh", "-c", "echo out; echo err >&2; exit 3")
    assert (done.returncode, done.stdout, done.tail) == (3, "out\n", ("out", "err"))


def test_a_command_that_hangs_is_left_and_named() -> None:
    """Also where a process that it started keeps its output open."""
    started = time.monotonic()
    with pytest.raises(TieringError, match=r"^sh -c .* did not end within 0 s$"):
        run("sh", "-c", "sleep 5 & sleep 5", seconds=0.3)
    assert time.monotonic() - started < 4


def test_a_variable_is_set_or_removed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ONE", "1")
    assert (
        run("sh", "-c", "echo ${ONE-none}$TWO", env={"ONE": None, "TWO": "2"}).stdout == "none2\n"
    )


def test_arguments_are_never_read_by_a_shell(tmp_path: Path) -> None:
    folder = tmp_path / "empty"
    folder.mkdir()
    assert run("echo", "$HOME; touch x", cwd=folder).stdout == "$HOME; touch x\n"
    assert list(folder.iterdir()) == []


def test_an_absent_program_is_a_missing_tool(tmp_path: Path, report: Report) -> None:
    with pytest.raises(MissingTool, match="no-such-program"):
        run("no-such-program")
    with pytest.raises(MissingTool, match="no-such-program"):
        stream("no-such-program", log=tmp_path / "log", cwd=tmp_path, env={}, report=report)


def test_stream_logs_the_command_and_every_line(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    seen: list[str] = []
    log = tmp_path / "log"
    done = stream(
        *("sh", "-c", "echo $X; echo two >&2"),
        log=log,
        cwd=tmp_path,
        env={"X": "one"},
        report=Report(verbose=True),
        on_line=seen.append,
    )
    assert done.tail == ("one", "two")
    assert seen == ["one", "two"]
    assert log.read_text() == "+ sh -c 'echo $X; echo two >&2'\none\ntwo\n"
    assert capsys.readouterr().err.startswith("+ sh -c")


def test_a_full_disk_is_recognised() -> None:
    assert run("sh", "-c", "echo 'x: No space left on device'; exit 1").disk_was_full
    assert not run("sh", "-c", "echo fine").disk_was_full


def test_an_interrupt_takes_the_command_along(tmp_path: Path) -> None:
    code = (
        "from pathlib import Path\n"
        "from ollama_tiering.patchset.run import stream\n"
        "from ollama_tiering.patchset.report import Report\n"
        f"stream('sh', '-c', 'echo $$; exec sleep 60', log=Path('{tmp_path}/log'),"
        f" cwd=Path('{tmp_path}'), env={{}}, report=Report())\n"
    )
    process = subprocess.Popen([sys.executable, "-c", code], stderr=subprocess.DEVNULL)
    log = tmp_path / "log"
    deadline = time.monotonic() + 20
    while not log.exists() or len(log.read_text().splitlines()) < 2:
        assert time.monotonic() < deadline
        time.sleep(0.02)
    process.send_signal(signal.SIGINT)
    process.wait(timeout=20)
    child = int(log.read_text().splitlines()[1])
    assert not Path(f"/proc/{child}").exists()


def test_the_lock_makes_the_second_wait(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    code = (
        "import fcntl, sys, time\n"
        f"f = open('{tmp_path}/lock', 'a')\n"
        "fcntl.flock(f, fcntl.LOCK_EX); print('held', flush=True); time.sleep(0.5)\n"
    )
    with subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE) as other:
        assert other.stdout is not None
        other.stdout.readline()
        started = time.monotonic()
        with locked(tmp_path / "lock", "somebody is at work", Report()):
            waited = time.monotonic() - started
    assert waited > 0.2
    assert "somebody is at work; waiting" in capsys.readouterr().err


def test_a_lock_is_waited_for_no_longer_than_is_said(tmp_path: Path) -> None:
    path, started = tmp_path / "lock", time.monotonic()
    with locked(path, "somebody is at work", Report()):
        with (
            pytest.raises(ServiceError, match=r"somebody is at work, and has not ended within 0 s"),
            locked(path, "somebody is at work", Report(), seconds=0.4),
        ):
            pytest.fail("two hold it")
        assert 0.3 < time.monotonic() - started < 4
    with locked(path, "nobody", Report(), seconds=0.4):
        pass
