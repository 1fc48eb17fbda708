"""`tiering up` as a person runs it: real command, real sidecar, a program that acts as Ollama."""

import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest

from ollama_tiering.launch import block_service
from ollama_tiering.launch.address import Address, free_address

pytestmark = pytest.mark.slow

REPOSITORY = Path(__file__).parents[2]
FAKE = REPOSITORY / "tests" / "unit" / "launch" / "fake_ollama.py"


class Place:
    """Private directories, and `tiering up` in them."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self.address: Address = free_address()
        self.fake = root / "fake"
        self.fake.mkdir()
        self.binary = self.fake / "ollama"
        self.binary.write_text(f"#!{sys.executable}\n{FAKE.read_text()}")
        self.binary.chmod(0o755)
        (root / "run").mkdir(mode=0o700)
        own = {n: v for n, v in os.environ.items() if not n.startswith(("OLLAMA_", "XDG_"))}
        self.env = own | {
            "HOME": str(root),
            "XDG_RUNTIME_DIR": str(root / "run"),
            "XDG_STATE_HOME": str(root / "state"),
            "XDG_DATA_HOME": str(root / "data"),
            "XDG_CACHE_HOME": str(root / "cache"),
            "XDG_CONFIG_HOME": str(root / "config"),
            "OLLAMA_KV_TIER_RAM": str(root / "ram"),
            "OLLAMA_TIERING_BINARY": str(self.binary),
            "OLLAMA_NUM_PARALLEL": "3",
            "PYTHONPATH": str(REPOSITORY),
        }
        self.started: list[subprocess.Popen[str]] = []

    @property
    def socket(self) -> Path:
        return self.root / "run" / "ollama-tiering" / "sidecar.sock"

    @property
    def record(self) -> dict[str, Any]:
        path = self.socket.with_name(f"up-{self.address.port}.json")
        return dict(json.loads(path.read_text()))

    @property
    def events(self) -> list[str]:
        file = self.fake / "events"
        return file.read_text().splitlines() if file.exists() else []

    def behave(self, **behaviour: Any) -> None:
        (self.fake / "behaviour.json").write_text(json.dumps(behaviour))

    def up(self, *options: str) -> "subprocess.Popen[str]":
        command = [sys.executable, "-m", "ollama_tiering", "up", "--host", str(self.address)]
        process = subprocess.Popen(
            [*command, *options],
            env=self.env,
            cwd=self.root,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        self.started.append(process)
        return process

    def up_and_ready(self, *options: str) -> "Running":
        return Running(self.up(*options))

    def close(self) -> None:
        for process in self.started:
            if process.poll() is None:
                process.send_signal(signal.SIGTERM)
                try:
                    process.wait(20)
                except subprocess.TimeoutExpired:
                    process.kill()
            process.wait()
            assert process.stdout
            process.stdout.close()
        if pid := block_service.owner(self.socket) if block_service.ask(self.socket) else None:
            os.kill(pid, signal.SIGTERM)
            wait_for(lambda: not self.socket.exists())


class Running:
    """One that got ready; `lines` are what it has said so far."""

    def __init__(self, process: "subprocess.Popen[str]") -> None:
        self.process = process
        self.lines: list[str] = []
        self.read_until("ready: ")
        self.read_until("  stop  ")

    def read_until(self, beginning: str) -> str:
        assert self.process.stdout
        for line in self.process.stdout:
            self.lines.append(line.rstrip())
            if line.startswith(beginning):
                return line
        raise AssertionError(f"it ended without {beginning!r}:\n" + "\n".join(self.lines))

    def end(self, number: signal.Signals = signal.SIGINT) -> list[str]:
        """What it says from now on."""
        before = len(self.lines)
        self.process.send_signal(number)
        return self.rest()[before:]

    def rest(self) -> list[str]:
        assert self.process.stdout
        self.lines += [line.rstrip() for line in self.process.stdout]
        self.process.wait(30)
        return self.lines


def wait_for(condition: Any, seconds: float = 20) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, "waited in vain"
        time.sleep(0.02)


@pytest.fixture
def place() -> Iterator[Place]:
    # a short path: a socket lies in it
    with tempfile.TemporaryDirectory(prefix="up-") as root:
        made = Place(Path(root))
        try:
            yield made
        finally:
            made.close()


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_it_serves_until_a_signal_then_stops_the_server_before_the_sidecar(
    place: Place, number: signal.Signals
) -> None:
    running = place.up_and_ready()
    assert block_service.ask(place.socket)
    said = running.end(number)
    assert running.process.returncode == 0
    assert place.events == ["serve started", "SIGTERM", "ended"]
    assert said[0].startswith("stopping: ")
    assert said[1] == "Ollama stopped; 0 blocks (0 B) were stored"
    assert said[2] == "sidecar stopped: everything is on disk"
    assert not place.socket.exists()


def test_the_server_sees_the_persons_variables_and_ours(place: Place) -> None:
    place.up_and_ready("--models", "models").end()
    seen = json.loads((place.fake / "environment.json").read_text())
    assert seen["OLLAMA_NUM_PARALLEL"] == "3"
    assert seen["OLLAMA_KV_TIERING"] == "1"
    assert seen["OLLAMA_KV_TIER_SOCKET"] == str(place.socket)
    assert seen["OLLAMA_MODELS"] == str(place.root / "models")


@pytest.mark.parametrize(
    ("file", "variable", "flag", "chosen"),
    [
        (None, None, None, "exact"),
        ("stock", None, None, "stock"),
        ("stock", "exact", None, "exact"),
        ("exact", "exact", "stock", "stock"),
    ],
)
def test_models_on_the_cpu_get_exact_attention_and_that_is_said(
    place: Place, file: str | None, variable: str | None, flag: str | None, chosen: str
) -> None:
    """Flag before variable before file; exact where none says anything."""
    if file:
        folder = place.root / "config/ollama-tiering"
        folder.mkdir(parents=True)
        (folder / "config.toml").write_text(f'[server]\ncpu_attention = "{file}"\n')
    if variable:
        place.env["OLLAMA_CPU_ATTENTION"] = variable
    running = place.up_and_ready(*(["--cpu-attention", flag] if flag else []))
    running.end()
    seen = json.loads((place.fake / "environment.json").read_text())
    assert seen["OLLAMA_CPU_ATTENTION"] == chosen
    said = [line for line in running.lines if "exact attention" in line]
    assert len(said) == (chosen == "exact")


def test_a_second_one_says_that_it_is_up_and_ends_well(place: Place) -> None:
    place.up_and_ready()
    second = place.up()
    out, _ = second.communicate(timeout=30)
    assert out.startswith(f"already up: {place.address.url} ")
    assert second.returncode == 0
    assert place.events == ["serve started"]


def test_a_second_signal_does_not_wait_for_a_deaf_server(place: Place) -> None:
    place.behave(deaf=True)
    running = place.up_and_ready()
    running.process.send_signal(signal.SIGINT)
    wait_for(lambda: "SIGTERM" in place.events)
    said = running.end()
    assert running.process.returncode == 0
    assert any("was killed" in line for line in said)
    assert said[-1] == "sidecar stopped: everything is on disk"


def test_a_server_that_dies_ends_it_with_the_last_lines_of_its_log(place: Place) -> None:
    place.behave(die_after_seconds=1)
    running = place.up_and_ready()
    text = "\n".join(running.rest())
    assert running.process.returncode == 9
    assert "ollama serve ended with exit code 3" in text
    assert "listening" in text  # the log
    assert not place.socket.exists()


def test_a_server_that_cannot_start_leaves_no_sidecar(place: Place) -> None:
    place.behave(die=5)
    process = place.up()
    out, _ = process.communicate(timeout=30)
    assert process.returncode == 9
    assert "something is wrong with me" in out
    assert not place.socket.exists()


def test_a_sidecar_that_is_killed_comes_back_while_the_server_goes_on(place: Place) -> None:
    running = place.up_and_ready()
    os.kill(place.record["sidecar_pid"], signal.SIGKILL)
    running.read_until("serving goes on without it")
    running.read_until("the sidecar runs again")
    assert block_service.ask(place.socket)
    assert place.events == ["serve started"]
    assert running.end()[-1] == "sidecar stopped: everything is on disk"


def test_a_sidecar_that_runs_already_is_used_and_left(place: Place) -> None:
    command = [sys.executable, "-m", "ollama_tiering", "sidecar"]
    log = (place.root / "own.log").open("w")
    own = subprocess.Popen(command, env=place.env, stdout=log, stderr=log)
    try:
        wait_for(lambda: block_service.ask(place.socket))
        running = place.up_and_ready()
        assert any("runs on" in line and str(own.pid) in line for line in running.lines)
        assert running.end()[-1] == "the sidecar ran before and stays"
        assert own.poll() is None
    finally:
        own.terminate()
        own.wait()
        log.close()


@pytest.mark.skipif(sys.platform != "linux", reason="only Linux signals the death of a parent")
def test_what_a_killed_one_left_is_cleared_away(place: Place) -> None:
    running = place.up_and_ready()
    record = place.record
    running.process.kill()
    running.process.wait()
    wait_for(lambda: not psutil.pid_exists(record["server_pid"]))
    assert place.events[-2:] == ["SIGTERM", "ended"]  # not killed: it could store its K/V
    assert psutil.pid_exists(record["sidecar_pid"])
    again = place.up_and_ready()
    assert any("a killed `tiering up` left" in line for line in again.lines)
    assert place.record["sidecar_pid"] != record["sidecar_pid"]


def test_a_port_that_another_ollama_has_is_refused_before_anything_is_built(place: Place) -> None:
    other = Place(Path(tempfile.mkdtemp(prefix="up-", dir=place.root)))
    other.address = place.address
    other.up_and_ready()
    try:
        place.env["OLLAMA_TIERING_BINARY"] = "/no/such/program"
        process = place.up()
        out, _ = process.communicate(timeout=30)
        assert process.returncode == 9
        assert f"another Ollama 0.16.3 listens on {place.address} already" in out
        assert "hint: stop it" in out
    finally:
        other.close()


def test_without_ollamas_source_it_says_how_to_get_it(place: Place) -> None:
    del place.env["OLLAMA_TIERING_BINARY"]
    process = place.up("--source", str(place.root / "nothing"))
    out, _ = process.communicate(timeout=60)
    assert process.returncode == 3
    assert "nothing: no such directory" in out
    assert "hint: --source takes a URL or the path of a clone" in out
