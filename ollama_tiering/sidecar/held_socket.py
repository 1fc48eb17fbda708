"""The name of one socket: reserved by a lock beside it, given to a socket that already listens, and
taken again when somebody removed it.

Cleaners remove old files, and logind removes its directories at the end of a session, under a
sidecar that goes on: from then on nobody could reach it.
"""

from __future__ import annotations

import asyncio
import contextlib
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


class HeldSocket:
    """`hidden` is where to bind: gRPC removes the name under which a server was bound when that
    server stops, and another one may have the socket's own name by then.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self.hidden = _hidden(path)
        self._lock_path = path.with_name(path.name + ".lock")
        self._lock = -1
        self._socket: tuple[int, int] | None = None

    def take(self) -> None:
        """Removes the socket of a dead sidecar; ServiceError or OSError if a live one has it."""
        secure_directory(self.path.parent)
        if not self._has_lock():
            lock = lock_file(self._lock_path, f"socket {self.path}")
            self._unlock()
            self._lock = lock
        if not self._has_name():
            _remove_dead_socket(self.path)

    def show(self) -> None:
        """Gives the socket that listens on `hidden` its name."""
        self.hidden.chmod(0o600)
        self.hidden.rename(self.path)
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
        self._unlock()

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

    def _unlock(self) -> None:
        if self._lock >= 0:
            os.close(self._lock)
            self._lock = -1


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


def _hidden(path: Path) -> Path:
    """Beside it, and as long: a longer name may be too long for a socket."""
    name = os.fsencode(path.name)
    return path.with_name(os.fsdecode(name[:-1] + (b"+" if name.endswith(b"~") else b"~")))


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
