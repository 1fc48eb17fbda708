"""Calls that a file system may not know, done as well as it can: what is not supported has not
failed, and waiting does not help.

exFAT and vfat keep no modes and no links. CIFS, DrvFs and some FUSE programs sync no directory.
Some cannot allocate or lock. What a directory's file system lacks is said by abilities.py.
"""

from __future__ import annotations

import errno
import os
import stat
from pathlib import Path
from typing import Final

NOT_SUPPORTED: Final = frozenset(
    (errno.EINVAL, errno.ENOSYS, errno.ENOTSUP, errno.EOPNOTSUPP, errno.ENOTTY)
)
NO_MODES: Final = NOT_SUPPORTED | {errno.EPERM}
OF_OTHERS: Final = stat.S_IRWXG | stat.S_IRWXO
_PART_BYTES: Final = 1 << 20
READ_ONLY: Final = 0o400
PROBE_PREFIX: Final = ".probe-"  # of files that the next start removes, should one be left


def sync(fd: int) -> None:
    """Makes a file or a directory durable, where the file system can be told to."""
    try:
        os.fsync(fd)
    except OSError as error:
        if error.errno not in NOT_SUPPORTED:
            raise


def make_read_only(fd: int) -> None:
    """OSError if others may read the file, whatever the file system knows of modes."""
    try:
        os.fchmod(fd, READ_ONLY)
    except OSError as error:
        if error.errno not in NO_MODES or os.fstat(fd).st_mode & OF_OTHERS:
            raise


def make_private(path: Path) -> None:
    """Works as `make_read_only`, for a file that is still to be written."""
    try:
        path.chmod(0o600)
    except OSError as error:
        if error.errno not in NO_MODES or path.stat().st_mode & OF_OTHERS:
            raise


def allocate(fd: int, file_bytes: int) -> None:
    """Real space, not a hole. Where it cannot be asked for, zeros are written."""
    try:
        os.posix_fallocate(fd, 0, file_bytes)
    except OSError as error:
        if error.errno not in NOT_SUPPORTED or file_bytes <= 0:
            raise
        for offset in range(0, file_bytes, _PART_BYTES):
            part = bytes(min(_PART_BYTES, file_bytes - offset))
            while part:
                written = os.pwrite(fd, part, offset)
                part, offset = part[written:], offset + written
