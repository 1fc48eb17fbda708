"""A child process with a log file: started in a session of its own, ended by its process id.

A signal to the whole process group would end Ollama's runner before the server could ask it to
store its K/V. So the first signal goes to the one process. What is left of the group is killed only
after that process has ended, or if `hurry` says so.
"""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import IO

from ollama_tiering.errors import MissingTool, ServiceError
from ollama_tiering.launch import leash
from ollama_tiering.launch.unharmed import in_one_line
from ollama_tiering.system.filesystems import is_full

POLL_SECONDS = 0.02
TAIL_LINES = 12
_TAIL_BYTES = 64 << 10


class Child:
    """One started program. Its creator calls `stop`; not thread-safe."""

    def __init__(self, name: str, process: subprocess.Popen[bytes], log: Path) -> None:
        self.name = name
        self.log = log
        self._process = process

    @property
    def pid(self) -> int:
        return self._process.pid

    @property
    def running(self) -> bool:
        return self._process.poll() is None

    @property
    def exit_code(self) -> int | None:
        """Is None while it runs; negative for a signal."""
        return self._process.poll()

    def how_it_ended(self) -> str:
        code = self.exit_code
        if code is None:
            return "runs"
        return f"was ended by {_signal_name(-code)}" if code < 0 else f"ended with exit code {code}"

    def stop(
        self,
        number: signal.Signals = signal.SIGTERM,
        *,
        seconds: float,
        hurry: Callable[[], bool] = lambda: False,
    ) -> bool:
        """Asks the process to end and waits. Kills it when the time is over or `hurry` says so, and
        then returns False.
        """
        if self.running:
            with contextlib.suppress(ProcessLookupError):
                self._process.send_signal(number)
        deadline = time.monotonic() + seconds
        while self.running and time.monotonic() < deadline and not hurry():
            time.sleep(POLL_SECONDS)
        polite = not self.running
        self.kill()
        return polite

    def kill(self) -> None:
        """Ends the process, and what it left in its session, at once."""
        # The group outlives its leader while a member lives, so its number is not somebody else's.
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(self.pid, signal.SIGKILL)
        self._process.wait()

    def tail(self, lines: int = TAIL_LINES) -> str:
        return log_tail(self.log, lines)


def start(
    name: str,
    *command: str | Path,
    log: Path,
    env: Mapping[str, str | None] | None = None,
    cwd: Path | None = None,
    leashed: bool = False,
) -> Child:
    """Starts a program whose output goes to `log`. `env` is added to our own environment; None
    removes a variable. `leashed`: the program gets SIGTERM if this process dies without stopping
    it.
    """
    program = [str(part) for part in command]
    if not Path(program[0]).is_file():
        raise MissingTool(f"{program[0]}: no such program", hint="build or install it again")
    if leashed:
        program = [sys.executable, "-IS", leash.__file__, *program]
    with _opened(log) as sink:
        process = subprocess.Popen(
            program,
            cwd=cwd,
            env=environment(env or {}),
            stdin=subprocess.DEVNULL,
            stdout=sink,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
    return Child(name, process, log)


def environment(overlay: Mapping[str, str | None]) -> dict[str, str]:
    """Our own environment with some variables set, and those that are None removed."""
    merged: dict[str, str | None] = {**os.environ, **overlay}
    return {name: value for name, value in merged.items() if value is not None}


def package_path() -> dict[str, str]:
    """What a fresh interpreter needs to import this package from where this one found it."""
    root = str(Path(__file__).parents[2])
    return {"PYTHONPATH": os.pathsep.join([root, *filter(None, [os.environ.get("PYTHONPATH")])])}


def wait_ready(
    child: Child,
    ready: Callable[[], bool],
    *,
    seconds: float,
    interrupted: Callable[[], bool] = lambda: False,
) -> None:
    """Returns when `ready` is true. ServiceError, with the last lines of the log, if the process
    dies or does not become ready in time.
    """
    deadline = time.monotonic() + seconds
    while not ready():
        if interrupted():
            raise KeyboardInterrupt
        if not child.running:
            raise died(child)
        if time.monotonic() > deadline:
            raise ServiceError(
                f"{child.name} did not answer within {seconds:.0f} s",
                hint=f"read {child.log}",
                told=child.tail(),
            )
        time.sleep(POLL_SECONDS)


def died(child: Child) -> ServiceError:
    return ServiceError(
        f"{child.name} {child.how_it_ended()}; last lines of its log:",
        hint=f"the whole log is {child.log}",
        told=child.tail(),
    )


def rotate(log: Path, warn: Callable[[str], None] = lambda _: None) -> Path:
    """Keeps the log of the last run as `<name>.1`. Where none can be written, what a program prints
    is lost, and `warn` hears why.
    """
    try:
        _make_private(log.parent)
        with contextlib.suppress(FileNotFoundError):
            log.replace(log.with_name(log.name + ".1"))
        log.open("ab").close()  # whether one can be written
        log.unlink()
    except OSError as error:
        warn(f"no log is written: {in_one_line(error)}")
        return Path(os.devnull)
    return log


def _make_private(folder: Path) -> None:
    for directory in (folder.parent, folder):  # private both, whatever the umask says
        directory.mkdir(mode=0o700, parents=True, exist_ok=True)


def _opened(log: Path) -> IO[bytes]:
    """Or the null device: a program runs without its log."""
    try:
        _make_private(log.parent)
        return log.open("ab")
    except OSError:
        return Path(os.devnull).open("ab")


def log_tail(log: Path, lines: int = TAIL_LINES) -> str:
    """The last lines, indented."""
    try:
        with log.open("rb") as file:
            file.seek(max(0, log.stat().st_size - _TAIL_BYTES))
            text = file.read().decode(errors="replace")
    except OSError:
        return f"  (no log {log})"
    said = "\n".join(f"  {line}" for line in text.splitlines()[-lines:])
    full = "; its disk is full: free some space there" if is_full(log) else ""
    return said or f"  (nothing in {log}{full})"


def _signal_name(number: int) -> str:
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"signal {number}"
