"""Files by descriptor: reads that fill a buffer, writes that finish, past the
page cache if wanted.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path

    from typing_extensions import Buffer

    WriteTo = Callable[[int, Buffer], None]


_NOT_DIRECT: Final = (errno.EINVAL, errno.EOPNOTSUPP)


def without_links(path: Path) -> Path:
    """Works as `Path.resolve`, which throws a RuntimeError for a link to itself before 3.13."""
    return type(path)(os.path.realpath(path))


@contextlib.contextmanager
def naming(path: Path) -> Iterator[None]:
    """Errors of files that are open name no path; those of the body name this one."""
    try:
        yield
    except OSError as error:
        if error.filename is None:
            error.filename = str(path)
        raise


def fd_reader(fd: int) -> Callable[[int, int], bytes]:
    """Reads with pread, so that a file that somebody cut short is an error and not a SIGBUS."""

    def read_at(offset: int, length: int) -> bytes:
        data = os.pread(fd, length, offset)
        while len(data) < length:
            more = os.pread(fd, length - len(data), offset + len(data))
            if not more:
                raise _short(len(data), length, offset)
            data += more
        return data

    return read_at


def fill(fd: int, offset: int, buffer: memoryview) -> None:
    """Reads until the buffer is full. EIO if the file ends before that."""
    at = 0
    while at < buffer.nbytes:
        read = os.preadv(fd, [buffer[at:]], offset + at)
        if not read:
            raise _short(at, buffer.nbytes, offset)
        at += read


def write_all(fd: int, offset: int, data: Buffer) -> None:
    view = memoryview(data).cast("B")
    while view:
        written = os.pwrite(fd, view, offset)
        view, offset = view[written:], offset + written


def writer(fd: int, *, past_cache: bool) -> WriteTo:
    """`write_all` on one descriptor. `past_cache` is for page-aligned parts of whole pages, if the
    file system supports it.
    """
    if past_cache:
        with contextlib.suppress(OSError):
            _set_direct(fd, True)

    def write(offset: int, data: Buffer) -> None:
        try:
            write_all(fd, offset, data)
        except OSError as error:
            if error.errno not in _NOT_DIRECT or not _set_direct(fd, False):
                raise
            write_all(fd, offset, data)

    return write


def _set_direct(fd: int, wanted: bool) -> bool:
    """Returns whether that changed anything."""
    flag = getattr(os, "O_DIRECT", 0)
    flags = fcntl.fcntl(fd, fcntl.F_GETFL)
    new = flags | flag if wanted else flags & ~flag
    if new != flags:
        fcntl.fcntl(fd, fcntl.F_SETFL, new)
    return new != flags


def _short(read: int, length: int, offset: int) -> OSError:
    return OSError(errno.EIO, f"short read: {read} of {length} bytes at {offset}")
