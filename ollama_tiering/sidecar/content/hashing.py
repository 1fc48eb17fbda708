"""The SHA-256 of a file that an engine has loaded, read as the engine saw it or not at all.

An engine names the path, so nothing is believed of it: what is no regular file, or another one than
the engine says, is not read. Nothing of the file leaves this module but its digest.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import stat
import threading
import time
from typing import Final

from ollama_tiering.protocol.loaded_file import FileIdentity, LoadedFile

_PIECE_BYTES: Final = 1 << 20
_FLAGS: Final = os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK | os.O_NOCTTY
_NICENESS: Final = 10
_TICK_SECONDS: Final = 0.05  # several ticks of the kernel's clock, by which times of change go
_COARSE_SECONDS: Final = 2.0  # ... of a file system that keeps whole seconds only
_SECOND_NS: Final = 1_000_000_000


class OtherFile(Exception):
    """The path does not lead to what the engine loaded."""


class NoFile(Exception):
    """The path leads to something that has no content: a directory, a pipe, a device."""


class Stopped(Exception):
    """The sidecar ends."""


def file_digest(file: LoadedFile, stopping: threading.Event) -> str:
    """Hex. May take minutes. OtherFile, NoFile, Stopped, OSError."""
    with contextlib.suppress(OSError, AttributeError):  # of this thread only, on Linux
        os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), _NICENESS)
    if stopping.wait(_unripe_seconds(file.identity, time.time_ns())):
        raise Stopped
    digest = hashlib.sha256()
    fd = os.open(file.path, _FLAGS)
    try:
        _require(fd, file.identity)
        piece = bytearray(_PIECE_BYTES)
        while count := os.readv(fd, [piece]):
            digest.update(memoryview(piece)[:count])
            if stopping.is_set():
                raise Stopped
        _require(fd, file.identity)
    finally:
        os.close(fd)
    return digest.hexdigest()


def _require(fd: int, identity: FileIdentity) -> None:
    info = os.fstat(fd)
    if not stat.S_ISREG(info.st_mode):
        raise NoFile
    if FileIdentity.of(info) != identity:
        raise OtherFile


def _unripe_seconds(identity: FileIdentity, now_ns: int) -> float:
    """How long it takes until the clock by which the file's time of change goes has moved on: a
    change within the same tick would not be seen.
    """
    whole = identity.ctime_ns % _SECOND_NS == 0
    grain = _COARSE_SECONDS if whole else _TICK_SECONDS
    return min(max(grain - (now_ns - identity.ctime_ns) / _SECOND_NS, 0.0), grain)
