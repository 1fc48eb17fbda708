"""`tiering up -d` and `tiering stop`: in the background, and its end."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Iterator

import pytest

from ollama_tiering.launch import block_service
from tests.integration.test_up import Place, wait_for
from tests.places import short_directory

pytestmark = pytest.mark.slow


class DetachedPlace(Place):
    def tiering(self, *words: str, code: int = 0) -> list[str]:
        """What a command says; it ends with this exit code."""
        command = [sys.executable, "-m", "ollama_tiering", *words, "--host", str(self.address)]
        done = subprocess.run(
            command, env=self.env, cwd=self.root, capture_output=True, text=True, timeout=60
        )
        assert done.returncode == code, done.stdout + done.stderr
        return (done.stdout + done.stderr).splitlines()

    def close(self) -> None:
        self.tiering("stop")
        super().close()


@pytest.fixture
def place() -> Iterator[DetachedPlace]:
    with short_directory() as root:
        made = DetachedPlace(root)
        try:
            yield made
        finally:
            made.close()


def test_it_serves_when_the_command_has_ended_and_until_it_is_stopped(place: DetachedPlace) -> None:
    said = place.tiering("up", "-d", "--models", "models")
    assert any(line.startswith("ready: Ollama") for line in said)
    assert f"  stop  tiering stop --host {place.address}" in said
    pid = place.record["pid"]
    assert os.getsid(pid) == pid  # no terminal that closes ends it
    assert block_service.ask(place.socket)
    again = place.tiering("up", "-d", "--models", "models")
    assert again[0].startswith("already up: ")
    assert place.record["pid"] == pid
    assert place.tiering("stop") == [f"stopped: {place.address.url} (process {pid})"]
    assert place.events == ["serve started", "SIGTERM", "ended"]
    assert not place.socket.exists()
    log = place.root / "state/ollama-tiering/logs" / f"up-{place.address.port}.log"
    assert "sidecar stopped: everything is on disk" in log.read_text()
    assert place.tiering("stop") == [f"no `tiering up` runs at {place.address.url}"]


def test_what_ends_before_it_serves_is_said_with_its_exit_code(place: DetachedPlace) -> None:
    place.binary.unlink()
    said = place.tiering("up", "-d", code=2)
    assert sum(line.startswith("error: ") for line in said) == 1
    assert place.tiering("stop") == [f"no `tiering up` runs at {place.address.url}"]


@pytest.mark.parametrize("installed", [False, True])
def test_one_in_a_terminal_is_stopped_too_and_ends_as_with_ctrl_c(
    place: DetachedPlace, installed: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    if installed:  # its command is a script, as pip and uv write one
        script = place.root / "tiering"
        script.write_text("from ollama_tiering.cli import main\nmain()\n")
        enter = place.entering
        monkeypatch.setattr(
            *(place, "entering"),
            lambda python, _m, _name, *words: enter(python, str(script), *words),
        )
    running = place.up_and_ready()
    assert place.tiering("stop")[0].startswith("stopped: ")
    assert running.rest()[-1] == "sidecar stopped: everything is on disk"
    assert running.process.returncode == 0


def test_a_number_that_is_somebody_elses_by_now_is_left_alone(place: DetachedPlace) -> None:
    place.tiering("up", "-d")
    path = place.socket.with_name(f"up-{place.address.port}.json")
    pid, before = place.record["pid"], path.read_text()
    with subprocess.Popen(["sleep", "60"]) as other:
        left = place.record | {"pid": other.pid, "started": time.time() - 60}
        path.write_text(json.dumps(left))
        assert place.tiering("stop") == [f"no `tiering up` runs at {place.address.url}"]
        assert other.poll() is None
        other.kill()
    path.write_text(before)
    assert place.tiering("stop") == [f"stopped: {place.address.url} (process {pid})"]
    wait_for(lambda: not place.socket.exists())
