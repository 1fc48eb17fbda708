"""When `tiering up` has a stored conversation computed again, and when that ends."""

from __future__ import annotations

import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from ollama_tiering.launch.idle_recheck import IdleRecheck
from ollama_tiering.launch.process import Child
from ollama_tiering.protocol.pb import administration_pb2 as adm
from ollama_tiering.store import block_store_pb2 as pb

WITH_A_CHILD = (
    "import subprocess, sys, time;"
    "subprocess.Popen([sys.executable, '-c', 'import time; time.sleep(60)']); time.sleep(60)"
)


class Machine:
    """A clock, and what the sidecar says."""

    def __init__(self, log: Path, *, every: float = 100.0, idle: float = 10.0) -> None:
        self.now = 0.0
        self.runners: dict[int, int] | None = {7: 1}
        self.look_ups = 0
        self.begun: list[Child] = []
        self._log = log
        self.again = IdleRecheck(
            Path("s"), every, idle, begin=self._begin, look=self._look, clock=lambda: self.now
        )

    def _begin(self, socket: Path) -> Child:
        process = subprocess.Popen([sys.executable, "-c", WITH_A_CHILD], start_new_session=True)
        self.begun.append(Child("a recheck", process, self._log))
        return self.begun[-1]

    def _look(self, socket: Path) -> adm.StatResponse | None:
        if self.runners is None:
            return None
        runners = [
            pb.RunnerReport(pid=pid, requests=count, tiered=True)
            for pid, count in self.runners.items()
        ]
        return adm.StatResponse(runners=runners, has_calls=self.look_ups)

    def at(self, seconds: float) -> int:
        """How many were begun by then."""
        self.now = seconds
        self.again()
        return len(self.begun)


@pytest.fixture
def machine(tmp_path: Path) -> Iterator[Machine]:
    made = Machine(tmp_path / "log")
    yield made
    made.again.close()


def test_it_begins_when_it_is_due_and_nobody_has_asked_for_a_while(machine: Machine) -> None:
    assert machine.at(0) == 0
    assert machine.at(99) == 0
    machine.runners = {7: 2}
    assert machine.at(105) == 0
    assert machine.at(114) == 0
    assert machine.at(115) == 1
    assert machine.at(300) == 1  # it runs


def test_a_request_ends_it_with_all_that_it_started(machine: Machine) -> None:
    machine.at(0)
    assert machine.at(101) == 1
    process = psutil.Process(machine.begun[0].pid)
    while not (below := process.children()):
        time.sleep(0.01)
    machine.runners = {7: 1, below[0].pid: 1}  # its own second server is no request of a person
    machine.at(103)
    assert machine.begun[0].running
    machine.runners = {7: 2}
    machine.at(105)
    assert not machine.begun[0].running
    psutil.wait_procs(below, 10)
    assert not below[0].is_running()
    assert machine.at(204) == 2


def test_a_prompt_ends_it_when_it_begins(machine: Machine) -> None:
    machine.at(0)
    assert machine.at(101) == 1
    machine.look_ups = 1
    machine.at(103)
    assert not machine.begun[0].running


def test_a_model_that_is_loaded_is_a_request(machine: Machine) -> None:
    machine.at(0)
    machine.runners = {7: 1, 8: 0}
    assert machine.at(101) == 0
    assert machine.at(111) == 1


def test_without_a_tiered_model_or_a_sidecar_nothing_begins(machine: Machine) -> None:
    machine.runners = {}
    assert machine.at(200) == 0
    machine.runners = None
    assert machine.at(300) == 0


def test_off_it_does_not_even_ask(tmp_path: Path) -> None:
    off = IdleRecheck(Path("s"), 0.0, 1.0, look=lambda _: pytest.fail("it asks"))
    off()
    off.close()


def test_one_that_cannot_begin_is_tried_when_it_is_due_again(machine: Machine) -> None:
    def fails(_: Path) -> Child:
        raise OSError(12, "Cannot allocate memory")

    machine.again._begin = fails
    machine.at(0)
    assert machine.at(101) == 0
    machine.again._begin = machine._begin
    assert machine.at(150) == 0
    assert machine.at(201) == 1
