"""The file that remembers the RAM tier's directory: mode 0600, ours, with one path in it.

Whoever could write this file would choose where blocks go. Whoever can read it learns the name
before the directory exists. So the file counts only if it is as we wrote it.
"""

from __future__ import annotations

import contextlib
import errno
import logging
import os
import secrets
import stat
from pathlib import Path
from typing import Final

log = logging.getLogger(__name__)

_READ: Final = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
_WRITE: Final = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
_MOST_BYTES: Final = 4096


def read_record(file: Path) -> Path | None:
    """Returns None if there is no record, or none that counts."""
    try:
        fd = os.open(file, _READ)
    except OSError as error:
        if error.errno != errno.ENOENT:
            log.warning("record of the RAM tier not read: path=%s error=%s", file, error.strerror)
        return None
    try:
        info = os.fstat(fd)
        private = not stat.S_IMODE(info.st_mode) & (stat.S_IRWXG | stat.S_IRWXO)
        if not stat.S_ISREG(info.st_mode) or info.st_uid != os.geteuid() or not private:
            log.warning("record of the RAM tier not used: path=%s is not ours alone", file)
            return None
        content = os.read(fd, _MOST_BYTES)
    except OSError as error:
        log.warning("record of the RAM tier not read: path=%s error=%s", file, error.strerror)
        return None
    finally:
        os.close(fd)
    text = os.fsdecode(content).removesuffix("\n")
    return Path(text) if text.startswith("/") and "\0" not in text else None


def write_record(file: Path, place: Path) -> None:
    """Replaces the record. If the state directory cannot be written, the next start does not find
    its RAM tier.
    """
    temporary = file.with_name(f".{file.name}.{secrets.token_hex(4)}.tmp")
    try:
        file.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        fd = os.open(temporary, _WRITE, 0o600)
        try:
            os.fchmod(fd, 0o600)
            os.write(fd, os.fsencode(place) + b"\n")
        finally:
            os.close(fd)
        temporary.replace(file)
    except OSError as error:
        log.warning("record of the RAM tier not written: path=%s error=%s", file, error.strerror)
        with contextlib.suppress(OSError):
            temporary.unlink()
