"""A file that one process holds at a time. The lock ends with the process, however that ends.

Whoever may open a file may lock it, so a file that is locked is its owner's alone.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import itertools
import os
import stat
from pathlib import Path
from typing import Final

from ollama_tiering.errors import ServiceError
from ollama_tiering.system.directories import UnsafeDirectory, UnusableDirectory

_HELD: Final = (errno.EWOULDBLOCK, errno.EAGAIN, errno.EACCES)
_LOCK: Final = os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC


def for_owner_only(fd: int) -> None:
    """Takes the others' rights from a file of ours, such as one that an older version made."""
    info = os.fstat(fd)
    ours = info.st_uid == os.geteuid() and info.st_nlink == 1  # a second name may be no lock's
    if ours and info.st_mode & 0o077:
        with contextlib.suppress(OSError):  # a file system without modes
            os.fchmod(fd, 0o600)


def open_to_lock(path: Path) -> int:
    """The file, which is made if it is missing, as are the directories on the way; 0600 and 0700.
    OSError, also for a link.
    """
    missing = itertools.takewhile(lambda one: not one.exists(), path.parents)
    for folder in reversed(list(missing)):
        folder.mkdir(mode=0o700, exist_ok=True)
    fd = os.open(path, _LOCK, 0o600)
    for_owner_only(fd)
    return fd


def lock_file(path: Path, purpose: str) -> int:
    """Holds an exclusive lock on `path` as long as the descriptor lives. ServiceError if another
    process has it; UnsafeDirectory if it is no regular file, UnusableDirectory if nothing can be
    locked there.
    """
    try:
        fd = os.open(path, _LOCK, 0o600)
    except OSError as error:
        if error.errno != errno.ELOOP:
            raise
        fd = -1  # a link
    if fd < 0 or not stat.S_ISREG(os.fstat(fd).st_mode):
        if fd >= 0:
            os.close(fd)
        raise UnsafeDirectory(f"{path} is not a regular file", hint="remove it")
    for_owner_only(fd)
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        if error.errno not in _HELD:
            os.close(fd)
            raise UnusableDirectory(
                f"{path} cannot be locked: {error.strerror}",
                hint="name a directory on another file system",
            ) from None
        owner = os.pread(fd, 32, 0).decode(errors="replace").strip()
        os.close(fd)
        raise ServiceError(
            f"{purpose} is in use by process {owner or 'unknown'}",
            hint="stop that sidecar, or give this one another directory and socket",
        ) from None
    said = f"{os.getpid()}\n".encode()
    with contextlib.suppress(OSError):  # a full disk: what counts is the lock
        os.pwrite(fd, said, 0)
        os.ftruncate(fd, len(said))
    return fd
