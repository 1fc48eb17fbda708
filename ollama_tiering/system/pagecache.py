"""What of a file is in the page cache, and how to keep it out of there."""

from __future__ import annotations

import errno
import mmap
import os
from typing import Final

_PAGE_BYTES: Final = 4096
_PROBES: Final = 8


def resident(fd: int, file_bytes: int) -> bool | None:
    """Probes pages with RWF_NOWAIT, which refuses to wait for a disk. None: partly, or not told."""
    nowait = getattr(os, "RWF_NOWAIT", None)
    if nowait is None or not file_bytes:
        return None
    page = bytearray(_PAGE_BYTES)
    present = 0
    for index in range(_PROBES):
        try:
            present += os.preadv(fd, [page], file_bytes * index // _PROBES, nowait) > 0
        except BlockingIOError:
            pass
        except OSError:
            return None
    return True if present == _PROBES else False if not present else None


def read_past(path: str, file_bytes: int, flags: int) -> mmap.mmap:
    """The first bytes of a block file, in memory of their own and not in the page cache too.

    Direct reads where the file system has them: the memory is page-aligned, and a block file whole
    pages long. EOFError when the file is shorter; OSError passes.
    """
    memory = mmap.mmap(-1, file_bytes)
    try:
        _read_into(memory, path, flags | getattr(os, "O_DIRECT", 0))
    except OSError as error:
        if error.errno not in (errno.EINVAL, errno.EOPNOTSUPP):
            raise
        _read_into(memory, path, flags)
    return memory


def read_whole(fd: int, file_bytes: int) -> mmap.mmap:
    """The first bytes of an open file, in memory of their own. EOFError when it is shorter."""
    memory = mmap.mmap(-1, file_bytes)
    _fill(memory, fd)
    return memory


def _read_into(memory: mmap.mmap, path: str, flags: int) -> None:
    fd = os.open(path, flags)
    try:
        _fill(memory, fd)
        forget(fd)  # of a file system without direct reads
    except EOFError as error:
        raise EOFError(f"{path}: {error}") from None
    finally:
        os.close(fd)


def _fill(memory: mmap.mmap, fd: int) -> None:
    with memoryview(memory) as view:
        offset = 0
        while offset < view.nbytes:
            read = os.preadv(fd, [view[offset:]], offset)
            if not read:
                raise EOFError(f"the file ends at {offset}")
            offset += read


def forget(fd: int) -> None:
    """Lets the system drop the clean pages of a file; those somebody has mapped stay."""
    os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
