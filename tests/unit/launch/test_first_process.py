"""Process 1 of a container reaps every orphan, passes signals on, and ends as its worker ends."""

from __future__ import annotations

import signal
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest

from ollama_tiering.launch import first_process

REPO = Path(__file__).parents[3]
OWN = ("unshare", "--map-root-user", "--pid", "--fork", "--kill-child", "--mount-proc")
BEGIN = "import os, signal, sys, time\nfrom ollama_tiering.launch import first_process\n"
STAND = "first_process.stand_before()\n"


def first(program: str) -> subprocess.Popen[str]:
    """The program as process 1 of a PID namespace of its own."""
    if subprocess.run([*OWN, "true"], capture_output=True, check=False).returncode:
        pytest.skip("no PID namespace can be made here")
    return subprocess.Popen(
        [*OWN, sys.executable, "-c", BEGIN + program],
        cwd=REPO,
        stdout=subprocess.PIPE,
        text=True,
    )


def process_1(starter: subprocess.Popen[str]) -> psutil.Process:
    """The one that `unshare` forked, seen from outside."""
    end = time.monotonic() + 10
    while not (children := psutil.Process(starter.pid).children()) and time.monotonic() < end:
        time.sleep(0.02)
    return children[0]


def test_anybody_else_goes_on_as_before() -> None:
    first_process.stand_before()
    assert signal.pthread_sigmask(signal.SIG_BLOCK, ()) == set()


def test_orphans_are_reaped_and_the_exit_code_is_the_workers() -> None:
    program = (
        STAND
        + """
if os.fork() == 0:
    for _ in range(5):
        if os.fork() == 0:
            os._exit(0)  # a zombie until somebody waits
    os._exit(0)
os.wait()
def zombies():
    count = 0
    for pid in filter(str.isdigit, os.listdir("/proc")):
        try:
            count += open(f"/proc/{pid}/stat").read().split()[2] == "Z"
        except OSError:  # reaped meanwhile
            pass
    return count
end = time.monotonic() + 10
while zombies() and time.monotonic() < end:
    time.sleep(0.02)
print(os.getpid() > 1, zombies())
sys.exit(7)
"""
    )
    done = first(program)
    said, _ = done.communicate(timeout=30)
    assert said.split() == ["True", "0"]
    assert done.returncode == 7


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT, signal.SIGHUP])
def test_a_signal_reaches_the_worker(number: signal.Signals) -> None:
    program = (
        STAND
        + f"""
def end(number, _):
    print("got", number, flush=True)
    sys.exit(3)
signal.signal({int(number)}, end)
print("ready", flush=True)
while True:
    time.sleep(1)
"""
    )
    started = first(program)
    assert started.stdout is not None
    assert started.stdout.readline() == "ready\n"
    process_1(started).send_signal(number)
    assert started.stdout.readline() == f"got {int(number)}\n"
    assert started.wait(10) == 3
    started.stdout.close()


def test_a_signal_that_ends_the_worker_is_told_as_a_shell_does() -> None:
    started = first(STAND + 'print("ready", flush=True)\ntime.sleep(60)')
    assert started.stdout is not None
    started.stdout.readline()
    process_1(started).send_signal(signal.SIGTERM)  # no handler: as process 1 it would go unheard
    assert started.wait(10) == 128 + signal.SIGTERM
    started.stdout.close()


def test_a_signal_before_the_fork_is_not_lost() -> None:
    """What comes while it forks waits until it stands."""
    program = """
fork = os.fork
def slowly():
    os.kill(1, signal.SIGTERM)  # blocked by now
    return fork()
os.fork = slowly
"""
    started = first(program + STAND + "time.sleep(60)")
    began = time.monotonic()
    assert started.wait(20) == 128 + signal.SIGTERM
    assert time.monotonic() - began < 20
    assert started.stdout is not None
    started.stdout.close()
