"""`tiering up` as process 1 of a container: SIGTERM ends it in order, and no zombie is left."""

from __future__ import annotations

import signal
import subprocess
import time

import psutil
import pytest

from tests.integration.test_up import Place, wait_for
from tests.places import short_directory
from tests.unit.launch.test_first_process import OWN

pytestmark = pytest.mark.slow


def test_it_ends_as_it_does_elsewhere() -> None:
    if subprocess.run([*OWN, "true"], capture_output=True, check=False).returncode:
        pytest.skip("no PID namespace can be made here")
    with short_directory() as short:
        place = Place(short / "root")
        place.entering = lambda *command: [*OWN, *command]  # type: ignore[method-assign]
        try:
            running = place.up_and_ready()
            (first,) = psutil.Process(running.process.pid).children()
            (worker,) = first.children()
            assert worker.cmdline() == first.cmdline()
            leave_an_orphan(first)
            wait_for(lambda: len(first.children()) == 2)
            wait_for(lambda: first.children() == [worker])  # a zombie would be one
            first.send_signal(signal.SIGTERM)
            began = time.monotonic()
            lines = running.rest()
            assert running.process.returncode == 0
            assert time.monotonic() - began < 30
            assert place.events == ["serve started", "SIGTERM", "ended"]
            said = [line.partition(":")[0].partition(";")[0] for line in lines[-3:]]
            assert said == ["stopping", "Ollama stopped", "sidecar stopped"]
        finally:
            place.close()


def leave_an_orphan(first: psutil.Process) -> None:
    """In the namespace, as `docker exec` does: its parent ends before it does."""
    orphan = "sleep 1 & exit"
    subprocess.run(["nsenter", "-t", str(first.pid), "-p", "sh", "-c", orphan], check=True)
