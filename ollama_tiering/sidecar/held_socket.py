"""The name of one socket: reserved by a lock beside it, given to a socket that already listens, and
taken again when somebody removed it.

Cleaners remove old files, and logind removes its directories at the end of a session, under a
sidecar that goes on: from then on nobody could reach it.
"""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import logging
import os
import socket
import stat
from collections.abc import Awaitable, Callable, Iterator, Mapping
from concurrent.futures import Executor
from pathlib import Path
from typing import Final

from ollama_tiering.errors import ServiceError
from ollama_tiering.system.directories import secure_directory
from ollama_tiering.system.locks import lock_file
from ollama_tiering.system.quiet_log import QuietLog

log = logging.getLogger(__name__)

LOOK_SECONDS: Final = 1.0
_DESCRIPTORS: Final = Path("/proc/self/fd")


class HeldSocket:
    """A socket is bound under `hidden_name`, and then gets its own: gRPC removes the name under
    which a server was bound when that server stops, and another one may have it by then.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self.hidden_name = f".s-{hashlib.sha256(os.fsencode(path.name)).hexdigest()[:16]}"
        self._hidden = path.with_name(self.hidden_name)
        self._directory = -1
        self._lock_path = path.with_name(path.name + ".lock")
        self._lock = -1
        self._socket: tuple[int, int] | None = None

    def take(self) -> None:
        """Removes the socket of a dead sidecar; ServiceError or OSError if a live one has it."""
        secure_directory(self.path.parent)
        directory = os.open(self.path.parent, os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC)
        _close(self._directory)  # only now: its number may soon be another file's
        self._directory = directory
        if not self._has_lock():
            lock = lock_file(self._lock_path, f"socket {self.path}")
            _close(self._lock)
            self._lock = lock
        if not self._has_name():
            _remove_dead_socket(self.path)

    def address(self) -> str:
        """Where to bind. Short, and without what the directory's name may hold: gRPC takes a comma
        for the end of an address.
        """
        self._hidden.unlink(missing_ok=True)
        if _DESCRIPTORS.is_dir():
            return f"{_DESCRIPTORS}/{self._directory}/{self.hidden_name}"
        return str(self._hidden)

    def show(self) -> None:
        """Gives the socket that was bound its name, as soon as it listens."""
        self._hidden.chmod(0o600)
        self._hidden.rename(self.path)
        self._socket = _inode(self.path.lstat())

    def lost(self) -> str:
        """Why nobody can reach it any more; empty if it is where it was."""
        if not self._has_lock():
            return "its lock is gone" if self.path.parent.is_dir() else "its directory is gone"
        if self._has_name():
            return ""
        return "another one has its name" if os.path.lexists(self.path) else "it is gone"

    def release(self) -> None:
        if self._has_name():
            with contextlib.suppress(OSError):
                self.path.unlink()
        _close(self._lock)
        _close(self._directory)
        self._lock = self._directory = -1

    def _has_name(self) -> bool:
        try:
            return _inode(self.path.lstat()) == self._socket
        except OSError:
            return False

    def _has_lock(self) -> bool:
        try:
            return self._lock >= 0 and _inode(self._lock_path.lstat()) == _inode(
                os.fstat(self._lock)
            )
        except OSError:
            return False


@contextlib.contextmanager
def hold_socket(path: Path) -> Iterator[HeldSocket]:
    """Reserves the socket's path; removes the socket of a dead sidecar, and fails if a live one has
    it.
    """
    held = HeldSocket(path)
    try:
        held.take()
        yield held
    finally:
        held.release()


async def keep_reachable(
    listening: Mapping[HeldSocket, Callable[[], Awaitable[None]]], pool: Executor
) -> None:
    """Runs until it is cancelled. The function of a socket makes it listen again."""
    seldom = QuietLog(log)
    while True:
        await asyncio.sleep(LOOK_SECONDS)
        for held, listen_again in listening.items():
            loop = asyncio.get_running_loop()
            try:
                if not (why := await loop.run_in_executor(pool, held.lost)):
                    continue
                await loop.run_in_executor(pool, held.take)
                if await loop.run_in_executor(pool, held.lost):  # not only its lock
                    await listen_again()
            except Exception as error:
                said = "nobody can reach the sidecar: socket=%s error=%s"
                seldom.warning(str(held.path), said, held.path, error)
            else:
                log.warning("socket made again: path=%s reason=%s", held.path, why)


def _close(descriptor: int) -> None:
    if descriptor >= 0:
        os.close(descriptor)


def _remove_dead_socket(path: Path) -> None:
    try:
        mode = path.lstat().st_mode
    except FileNotFoundError:
        return
    if not stat.S_ISSOCK(mode):
        raise ServiceError(
            f"{path} exists and is not a socket", hint="remove it, or name another with --socket"
        )
    with socket.socket(socket.AF_UNIX) as probe:
        probe.settimeout(1)
        try:
            probe.connect(os.fspath(path))
        except OSError:
            log.info("dead socket removed: path=%s", path)
            path.unlink(missing_ok=True)
            return
    raise ServiceError(
        f"a process listens on {path} already",
        hint="use it (`tiering status`), stop it, or name another socket with --socket",
    )


def _inode(info: os.stat_result) -> tuple[int, int]:
    return info.st_dev, info.st_ino
