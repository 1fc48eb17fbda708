"""What a directory's file system can do, tried once on a small file: waiting will not teach it."""

from __future__ import annotations

import contextlib
import os
import secrets
from collections.abc import Callable
from pathlib import Path

from ollama_tiering.system.directories import not_private
from ollama_tiering.system.lacking import (
    NO_MODES,
    NOT_SUPPORTED,
    OF_OTHERS,
    PROBE_PREFIX,
    READ_ONLY,
)


def lacks(directory: Path) -> list[str]:
    """What the directory's file system cannot do, in words. NotPrivate where what is written there
    could be read by others. OSError where nothing can be written now.
    """
    path = directory / f"{PROBE_PREFIX}{secrets.token_hex(4)}"
    fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
    found: list[str] = []
    try:
        info = os.fstat(fd)
        if info.st_uid != os.geteuid() or info.st_mode & OF_OTHERS:
            raise not_private(directory, info)
        for what, call, known in (
            ("a file cannot be made read-only", lambda: os.fchmod(fd, READ_ONLY), NO_MODES),
            ("space cannot be allocated", lambda: os.posix_fallocate(fd, 0, 1), NOT_SUPPORTED),
            ("a file cannot be synced", lambda: os.fsync(fd), NOT_SUPPORTED),
            ("a directory cannot be synced", lambda: _sync_names(directory), NOT_SUPPORTED),
        ):
            if not _can(call, known):
                found.append(what)
    finally:
        os.close(fd)
        with contextlib.suppress(OSError):
            path.unlink()
    return found


def _can(call: Callable[[], None], known: frozenset[int]) -> bool:
    try:
        call()
    except OSError as error:
        return error.errno not in known
    return True


def _sync_names(directory: Path) -> None:
    fd = os.open(directory, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)
