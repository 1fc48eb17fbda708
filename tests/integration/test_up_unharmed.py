"""`tiering up` ends nowhere where stock serves: each of its own file operations fails once."""

from __future__ import annotations

import errno
import os
import shutil
import signal
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from ollama_tiering.cli import cli
from ollama_tiering.cli import up as command
from ollama_tiering.errors import ServiceError
from ollama_tiering.launch.address import free_address
from ollama_tiering.launch.block_service import BlockService

FAKE = Path(__file__).parents[1] / "unit" / "launch" / "fake_ollama.py"
EVENTS = ("open", "os.mkdir", "os.rename", "os.remove", "os.truncate", "os.listdir", "os.scandir")


class Saboteur:
    """Makes the nth operation below a directory fail. A hook of this kind cannot be removed, so
    there is one for all tests.
    """

    def __init__(self) -> None:
        self.below: Path | None = None
        self.fails_at = -1
        self.error = errno.EACCES
        self.seen: list[str] = []
        sys.addaudithook(self._hook)

    def _hook(self, event: str, arguments: tuple[Any, ...]) -> None:
        if self.below is None or threading.current_thread() is not threading.main_thread():
            return
        if event == "fcntl.flock":
            what = "fcntl.flock"
        elif event in EVENTS and isinstance(arguments[0], str | bytes | os.PathLike):
            path = os.fsdecode(arguments[0])
            if not path.startswith(str(self.below)):
                return
            what = f"{event} {path.removeprefix(str(self.below))}"
        else:
            return
        self.seen.append(what)
        if len(self.seen) - 1 == self.fails_at:
            raise OSError(self.error, os.strerror(self.error), str(arguments[0]))


SABOTEUR = Saboteur()
_PORT = free_address().port


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """For `tiering up` in this process, with a real server and a sidecar that fails at once."""
    home = tmp_path / "home"
    home.mkdir()
    program = tmp_path / "fake" / "ollama"
    program.parent.mkdir()
    program.write_text(f"#!{sys.executable}\n{FAKE.read_text()}")
    program.chmod(0o755)
    for name in list(os.environ):
        if name.startswith(("OLLAMA_", "XDG_")):
            monkeypatch.delenv(name)
    monkeypatch.setenv("HOME", str(home))
    monkeypatch.setenv("OLLAMA_TIERING_BINARY", str(program))

    def fails(*_: object) -> None:
        raise ServiceError("the sidecar does not start", hint="a test")

    monkeypatch.setattr(BlockService, "ensure", fails)
    yield home
    SABOTEUR.below = None


class Served:
    """How often the server has answered; then `tiering up` is asked to end."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.times = 0
        real = command._ready

        def ready(*given: Any) -> None:
            self.times += 1
            os.kill(os.getpid(), signal.SIGINT)
            real(*given)

        monkeypatch.setattr(command, "_ready", ready)


def up() -> None:
    before = signal.getsignal(signal.SIGTERM)
    try:
        cli.main(["up", "--host", f"127.0.0.1:{_PORT}"], standalone_mode=False)
    finally:
        signal.signal(signal.SIGTERM, before)


def operations(home: Path) -> list[str]:
    SABOTEUR.seen, SABOTEUR.fails_at, SABOTEUR.below = [], -1, home
    up()
    SABOTEUR.below = None
    return SABOTEUR.seen


@pytest.mark.slow
@pytest.mark.parametrize("started_before", [False, True])
def test_whatever_fails_of_ours_the_server_starts(
    home: Path,
    monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
    started_before: bool,
) -> None:
    served = Served(monkeypatch)
    whole = operations(home)
    if started_before:
        whole = operations(home)
    assert len(whole) > 4, whole
    failed = 0
    for number, what in enumerate(whole):
        if not started_before:
            _empty(home)
        times = served.times
        SABOTEUR.seen, SABOTEUR.fails_at, SABOTEUR.below = [], number, home
        SABOTEUR.error = (errno.EACCES, errno.EROFS, errno.ENOSPC)[number % 3]
        try:
            up()
        finally:
            SABOTEUR.below = None
        assert served.times == times + 1, what
        failed += len(SABOTEUR.seen) > number
        assert "Traceback" not in capfd.readouterr().err
    assert failed >= len(whole) - 2  # what one run leaves decides how much the next one does


def _empty(home: Path) -> None:
    shutil.rmtree(home)
    home.mkdir()


def _unusable(kind: str, home: Path) -> None:
    state = home / ".local/state/ollama-tiering"
    if kind == "files instead of directories":
        home.rmdir()
        home.touch()
    elif kind == "records are directories":
        (state / "run").mkdir(parents=True)
        (state / "run" / f"up-{_PORT}.json").mkdir()
    elif kind == "logs are directories":
        for name in ("ollama", "sidecar"):
            (state / "logs" / f"{name}-{_PORT}.log" / "x").mkdir(parents=True)
            (state / "logs" / f"{name}-{_PORT}.log.1" / "x").mkdir(parents=True)
    elif kind == "the log of before is a directory":
        for name in ("ollama", "sidecar"):
            (state / "logs" / f"{name}-{_PORT}.log.1" / "x").mkdir(parents=True)
            (state / "logs" / f"{name}-{_PORT}.log").touch()
    elif kind == "a link that leads nowhere":
        (home / ".local").symlink_to("/nowhere/at/all")
    elif kind == "a working directory that is gone":
        gone = home / "gone"
        gone.mkdir()
        os.chdir(gone)
        gone.rmdir()


@pytest.mark.parametrize(
    "kind",
    [
        "files instead of directories",
        "records are directories",
        "logs are directories",
        "the log of before is a directory",
        "a link that leads nowhere",
        "a working directory that is gone",
    ],
)
def test_places_that_cannot_be_used_cost_a_line(
    home: Path,
    monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
    kind: str,
) -> None:
    monkeypatch.chdir(home.parent)
    served = Served(monkeypatch)
    _unusable(kind, home)
    up()
    monkeypatch.chdir("/")
    assert served.times == 1
    said = [line for line in capfd.readouterr().err.splitlines() if line.startswith("warning: ")]
    assert said
    assert all(len(line) < 600 for line in said)


def test_a_disk_that_fills_up_costs_the_record(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    served, pwrite = Served(monkeypatch), os.pwrite
    calls = []

    def full(handle: int, data: bytes, offset: int) -> int:
        calls.append(offset)
        if len(calls) % 2:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        return pwrite(handle, data, offset)

    monkeypatch.setattr(os, "pwrite", full)
    up()
    assert served.times == 1
    assert calls
