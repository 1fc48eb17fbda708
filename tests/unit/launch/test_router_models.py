"""Who is asked to end beside a router: its models, and nobody else."""

from __future__ import annotations

import signal
import subprocess
import sys
from collections.abc import Iterator

import psutil
import pytest

from ollama_tiering.launch import router_models

# Its models run its own program, a tool another one.
ROUTER = """\
import subprocess, sys
model = [sys.executable, "-c", "import sys; sys.stdin.read()", "--alias"]
tool = ["sh", "-c", "read x", "--alias", "t"]
commands = ([*model, "Qwen3:Q4_K_M", "-np", "1"], [*model, "a\\x1bname"], tool)
started = [subprocess.Popen(one, stdin=subprocess.PIPE) for one in commands]
print(*(one.pid for one in started), flush=True)
for one in started:
    one.wait()
"""


@pytest.fixture
def router() -> Iterator[subprocess.Popen[str]]:
    with subprocess.Popen(
        [sys.executable, "-c", ROUTER], stdout=subprocess.PIPE, text=True
    ) as process:
        yield process
        process.kill()  # the others see the end of their input


def test_its_models_get_the_signal_and_others_do_not(router: subprocess.Popen[str]) -> None:
    assert router.stdout is not None
    pids = [int(word) for word in router.stdout.readline().split()]
    *models, tool = (psutil.Process(pid) for pid in pids)
    router_models.ask_to_end(router.pid)
    assert psutil.wait_procs(models, timeout=20)[1] == []
    assert router.poll() is None
    with pytest.raises(psutil.TimeoutExpired):
        tool.wait(0.5)


def test_one_that_has_ended_has_none(router: subprocess.Popen[str]) -> None:
    router.send_signal(signal.SIGKILL)
    router.wait()
    router_models.ask_to_end(router.pid)


def test_the_name_by_which_it_asks_for_each(router: subprocess.Popen[str]) -> None:
    assert router.stdout is not None
    one, other, tool = (int(word) for word in router.stdout.readline().split())
    names = [router_models.name_of(pid) for pid in (one, other, tool)]
    assert names == ["Qwen3:Q4_K_M", r"a\x1bname", ""]
    assert router_models.name_of(2**22 + 1) == "", "no such process"
    lone = ["sh", "-c", "read x", "--alias", "x"]
    with subprocess.Popen(lone, stdin=subprocess.PIPE) as process:
        assert router_models.name_of(process.pid) == ""
        process.kill()
