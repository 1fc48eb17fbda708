"""A child is ended by its own process id first, and nothing of it stays."""

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import psutil
import pytest

from ollama_tiering.errors import MissingTool, ServiceError
from ollama_tiering.launch import process
from ollama_tiering.launch.process import Child


def wait_for(condition: Callable[[], bool], seconds: float = 10) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, "waited in vain"
        time.sleep(0.01)


def start(tmp_path: Path, code: str, **more: object) -> Child:
    return process.start("it", sys.executable, "-c", code, log=tmp_path / "log", **more)


def test_the_directories_of_a_log_are_private(tmp_path: Path) -> None:
    """The state directory is one of them: others' programs trust what lies in it."""
    before = os.umask(0o002)
    try:
        log = tmp_path / "state" / "logs" / "it.log"
        process.start("it", sys.executable, "-c", "", log=log).stop(seconds=10)
    finally:
        os.umask(before)
    assert [path.stat().st_mode & 0o777 for path in log.parents[:2]] == [0o700, 0o700]


# The parent notes when it was asked to end, its child when it was; both take it calmly.
FAMILY = """
import os, signal, sys, time
who = "child" if os.fork() == 0 else "parent"
def asked(*_):
    print(who, "asked", flush=True)
    if who == "parent":
        sys.exit(0)
signal.signal(signal.SIGTERM, asked)
print(who, os.getpid(), flush=True)
while True:
    time.sleep(0.02)
"""


def test_a_stop_reaches_the_process_and_not_its_group(tmp_path: Path) -> None:
    child = start(tmp_path, FAMILY)
    wait_for(lambda: child.log.read_text().count("\n") == 2)
    grandchild = int(child.log.read_text().split("child ")[1].split()[0])
    assert child.stop(seconds=10)
    assert "parent asked" in child.log.read_text()
    assert "child asked" not in child.log.read_text()
    wait_for(lambda: not psutil.pid_exists(grandchild) or is_zombie(grandchild))


def is_zombie(pid: int) -> bool:
    try:
        return psutil.Process(pid).status() == psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return True


DEAF = (
    "import signal, time; signal.signal(15, signal.SIG_IGN); print(1, flush=True); time.sleep(60)"
)


def test_what_does_not_listen_is_killed_when_its_time_is_over(tmp_path: Path) -> None:
    child = start(tmp_path, DEAF)
    wait_for(lambda: child.log.read_text() != "")
    assert not child.stop(seconds=0.1)
    assert child.how_it_ended() == "was ended by SIGKILL"


def test_a_hurry_does_not_wait(tmp_path: Path) -> None:
    child = start(tmp_path, DEAF)
    wait_for(lambda: child.log.read_text() != "")
    started = time.monotonic()
    assert not child.stop(seconds=60, hurry=lambda: True)
    assert time.monotonic() - started < 10


def test_stopping_what_has_ended_is_nothing(tmp_path: Path) -> None:
    child = start(tmp_path, "raise SystemExit(3)")
    wait_for(lambda: not child.running)
    assert child.stop(seconds=1)
    assert child.how_it_ended() == "ended with exit code 3"


def test_variables_are_passed_on_set_and_removed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("KEPT", "1")
    monkeypatch.setenv("REMOVED", "1")
    code = "import os; print({n: os.environ.get(n) for n in ('KEPT', 'REMOVED', 'SET')})"
    child = start(tmp_path, code, env={"REMOVED": None, "SET": "2"})
    wait_for(lambda: not child.running)
    assert child.tail().strip() == "{'KEPT': '1', 'REMOVED': None, 'SET': '2'}"


def test_one_that_dies_before_it_is_ready_is_an_error_with_its_last_words(tmp_path: Path) -> None:
    child = start(tmp_path, "print('no room for me'); raise SystemExit(4)")
    with pytest.raises(ServiceError, match=r"exit code 4.*\n.*no room for me") as caught:
        process.wait_ready(child, lambda: False, seconds=10)
    assert str(child.log) in str(caught.value.hint)


def test_one_that_never_gets_ready_is_an_error(tmp_path: Path) -> None:
    child = start(tmp_path, DEAF)
    with pytest.raises(ServiceError, match="did not answer within"):
        process.wait_ready(child, lambda: False, seconds=0.05)
    child.kill()


def test_waiting_can_be_interrupted(tmp_path: Path) -> None:
    child = start(tmp_path, DEAF)
    with pytest.raises(KeyboardInterrupt):
        process.wait_ready(child, lambda: False, seconds=10, interrupted=lambda: True)
    child.kill()


def test_a_missing_program_is_named(tmp_path: Path) -> None:
    with pytest.raises(MissingTool, match="no-such-program"):
        process.start("it", tmp_path / "no-such-program", log=tmp_path / "log")


def test_the_log_of_the_run_before_is_kept(tmp_path: Path) -> None:
    log = tmp_path / "log"
    log.write_text("old")
    assert process.rotate(log) == log
    assert not log.exists()
    assert log.with_name("log.1").read_text() == "old"


@pytest.mark.skipif(sys.platform != "linux", reason="only Linux signals the death of a parent")
def test_a_leashed_child_is_asked_to_end_when_its_parent_is_killed(tmp_path: Path) -> None:
    child = "import signal, time; signal.signal(15, lambda *_: (print('asked', flush=True), "
    child += "exit())); print('ready', flush=True); time.sleep(60)"
    code = "import sys, time; from pathlib import Path; from ollama_tiering.launch import process\n"
    code += f"c = process.start('it', sys.executable, '-c', {child!r}, "
    code += f"log=Path({str(tmp_path / 'log')!r}), leashed=True)\ntime.sleep(60)"
    parent = subprocess.Popen([sys.executable, "-c", code], env=os.environ)
    log = tmp_path / "log"
    wait_for(lambda: log.exists() and "ready" in log.read_text())
    parent.send_signal(signal.SIGKILL)
    parent.wait()
    wait_for(lambda: "asked" in log.read_text())
