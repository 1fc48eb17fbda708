"""Who serves from a tree of links, by a lock on its record: shared by all who do, and taken alone
by whoever removes it. It ends with the process, however that ends, and is the same for every user.
A service has no such lock, because a shell starts its server: that is seen by its program.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import shutil
import stat
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Final

from ollama_tiering.errors import ServiceError
from ollama_tiering.patchset.llama_server.link_tree import RECORD
from ollama_tiering.system.locks import for_owner_only

UNFINISHED: Final = ".building-"  # begins the name of a folder that goes with the next patch
_PROCESSES: Final = Path("/proc")
_RECORD_FILE: Final = os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK
_NO_LOCKS: Final = (errno.ENOLCK, errno.ENOSYS, errno.EOPNOTSUPP)


def hold(folder: Path, uses: contextlib.ExitStack, record: str = RECORD) -> bool:
    """Until `uses` ends nobody removes the tree in `folder`. False where it is gone or going."""
    try:
        fd = _opened(folder / record)
    except OSError:  # gone; or another user's, which this one cannot keep
        return False
    if not _locked(fd, fcntl.LOCK_SH) or not _is_at(fd, folder / record):
        os.close(fd)
        return False
    uses.callback(os.close, fd)
    return True


def remove_all(folders: Sequence[Path]) -> None:
    """ServiceError, and nothing is removed, where one of them is in use: its next llama-server
    would not start.
    """
    with contextlib.ExitStack() as taken:
        for folder in folders:
            if not taken.enter_context(_taken(folder)):
                raise ServiceError(
                    f"a running Ollama serves from {folder}", hint="end it first: tiering status"
                )
        for folder in folders:
            put_away(folder)


def remove_unused(folder: Path, record: str = RECORD) -> bool:
    """Whether it was removed: not where it is in use."""
    with _taken(folder, record) as alone:
        if alone:
            put_away(folder)
        return alone


def put_away(folder: Path) -> None:
    """A removal that is killed half-way leaves no half tree by that name."""
    with tempfile.TemporaryDirectory(dir=folder.parent, prefix=UNFINISHED) as place:
        with contextlib.suppress(FileNotFoundError):  # a cleaner of caches was faster
            folder.rename(Path(place, folder.name))
        shutil.rmtree(Path(place, folder.name), ignore_errors=True)


@contextlib.contextmanager
def _taken(folder: Path, record: str = RECORD) -> Iterator[bool]:
    try:
        fd = _opened(folder / record)
    except FileNotFoundError:  # no record, so nobody can hold it
        yield True
        return
    except OSError:  # it cannot be known
        yield False
        return
    try:
        yield _locked(fd, fcntl.LOCK_EX) and not _runs(folder)
    finally:
        os.close(fd)


def _runs(folder: Path) -> bool:
    """Whether a process that this user may look at has a program of the folder."""
    below = f"{folder.resolve()}/"
    for program in _PROCESSES.glob("[0-9]*/exe"):
        with contextlib.suppress(OSError):  # it has just ended, or is another user's
            if str(program.readlink()).startswith(below):
                return True
    return False


def _opened(record: Path) -> int:
    """For writing, where that is allowed: over NFS a lock for one alone needs it. No link is
    followed: root looks in the caches of others.
    """
    try:
        fd = os.open(record, os.O_RDWR | _RECORD_FILE)
    except OSError as error:
        if error.errno not in (errno.EACCES, errno.EPERM, errno.EROFS):
            raise
        fd = os.open(record, os.O_RDONLY | _RECORD_FILE)
    if not stat.S_ISREG(os.fstat(fd).st_mode):
        os.close(fd)
        raise OSError(errno.EINVAL, "not a regular file", str(record))
    for_owner_only(fd)
    return fd


def _locked(fd: int, kind: int) -> bool:
    """Also true on a file system without locks: there nobody can be kept from anything."""
    try:
        fcntl.flock(fd, kind | fcntl.LOCK_NB)
    except OSError as error:
        return error.errno in _NO_LOCKS
    return True


def _is_at(fd: int, record: Path) -> bool:
    """It may have been put away between the look and the lock."""
    try:
        return os.path.samestat(os.fstat(fd), record.stat())
    except OSError:
        return False
