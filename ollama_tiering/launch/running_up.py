"""Which `tiering up` has a port, and what it started: a locked file that says so.

The lock ends with the process, however that ends. Content without a lock is what a killed process
left.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
from collections.abc import Iterator
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Final

import psutil

from ollama_tiering import config
from ollama_tiering.errors import TieringError
from ollama_tiering.launch.address import Address
from ollama_tiering.launch.unharmed import in_one_line
from ollama_tiering.system.locks import open_to_lock


@dataclass(slots=True)
class RunningUp:
    """What is known of a running `tiering up`; pids are 0 while there is no such process. After an
    orderly end only `models` is left, and pid is 0.
    """

    pid: int
    url: str
    socket: str = ""
    binary: str = ""
    ready: bool = False
    server_pid: int = 0
    sidecar_pid: int = 0
    server_log: str = ""
    sidecar_log: str = ""  # of the sidecar that is used, whoever started it; empty: not known
    models: str = ""  # the server's models directory
    started: float = 0.0  # Unix seconds


_KNOWN: Final = frozenset(field.name for field in fields(RunningUp))


class AlreadyUp(Exception):
    """Another process holds the record. This is no error: the work is done, or is being done."""

    def __init__(self, record: RunningUp | None) -> None:
        super().__init__()
        self.record = record


class UpLock:
    """A record that this process holds. `write` replaces its content; `close` empties it, but keeps
    `models`.
    """

    def __init__(self, handle: int, left: RunningUp | None, lacks: str = "") -> None:
        self._handle = handle
        self._models = ""
        self.left = left  # by one that was killed
        self.lacks = lacks  # why others cannot see it

    def write(self, record: RunningUp) -> None:
        """What others see is for their convenience: that it cannot be written ends nothing."""
        self._models = record.models
        content = json.dumps(asdict(record), indent=1).encode() + b"\n"
        with contextlib.suppress(OSError):
            os.pwrite(self._handle, content, 0)
            os.ftruncate(self._handle, len(content))

    def close(self) -> None:
        """The models directory stays known, because names of stored models are read there."""
        with contextlib.suppress(OSError):
            os.ftruncate(self._handle, 0)
        if self._models:
            self.write(RunningUp(pid=0, url="", models=self._models))


def record_path(address: Address) -> Path:
    """Named after the port, so `localhost` and `127.0.0.1` are one place."""
    return config.run_dir() / f"up-{address.port}.json"


def _second_path(address: Address) -> Path:
    return config.state_dir() / "run" / record_path(address).name


@contextlib.contextmanager
def hold(address: Address) -> Iterator[UpLock]:
    """Holds the port against another `tiering up`; AlreadyUp if one has it. Where no record can be
    written, only the port itself keeps them apart.
    """
    handle, lacks = _held(address)
    try:
        left = _read(handle)
        held = UpLock(handle, left if left and left.pid else None, lacks)
        yield held
        held.close()
    finally:
        os.close(handle)


def _held(address: Address) -> tuple[int, str]:
    """A locked file, and what is wrong with it. AlreadyUp."""
    why = ""
    for place in (record_path, _second_path):  # the first may be somebody else's, as after `su`
        handle = -1
        try:
            handle = open_to_lock(place(address))
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
            return handle, ""
        except BlockingIOError:
            found = _read(handle)
            os.close(handle)
            if found is None or not found.pid or psutil.pid_exists(found.pid):
                raise AlreadyUp(found) from None
            why = "another machine or container with this home has the record"
        except (OSError, TieringError) as error:
            why = in_one_line(error)
            if handle >= 0:
                os.close(handle)
    said = "a second `tiering up`, `tiering status` and `tiering logs` do not see this one"
    return os.open(os.devnull, os.O_RDWR | os.O_CLOEXEC), f"{said}: {why}"


def running(address: Address) -> RunningUp | None:
    """What a running `tiering up` says of itself. It takes no lock, so it gets in nobody's way."""
    for path in (record_path(address), _second_path(address)):
        try:
            handle = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW)
        except OSError:
            continue
        try:
            record = _read(handle)
        finally:
            os.close(handle)
        if record and record.pid and psutil.pid_exists(record.pid):
            return record
    return None


def binaries() -> list[Path]:
    """The binaries of every `tiering up` that runs, or was killed."""
    return [Path(record.binary) for record in records() if record.binary]


def records() -> list[RunningUp]:
    """The record of every `tiering up` that runs, was killed, or said where its models are; the
    latest first.
    """
    folders = (config.run_dir(), config.state_dir() / "run")
    found: list[tuple[int, RunningUp]] = []
    for path in (path for folder in folders for path in folder.glob("up-*.json")):
        with contextlib.suppress(OSError):
            handle = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW)
            try:
                if record := _read(handle):
                    found.append((os.fstat(handle).st_mtime_ns, record))
            finally:
                os.close(handle)
    return [record for _, record in sorted(found, key=lambda one: -one[0])]


def _read(handle: int) -> RunningUp | None:
    """Returns None if there is nothing sensible."""
    try:
        values = dict(json.loads(os.pread(handle, 1 << 16, 0)))
        return RunningUp(**{name: value for name, value in values.items() if name in _KNOWN})
    except (ValueError, TypeError):
        return None
