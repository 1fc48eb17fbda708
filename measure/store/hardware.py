"""What the machine does without a store: memcpy, and reading and writing one file past the page
cache.
"""

from __future__ import annotations

import contextlib
import mmap
import os
import time
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Final

import numpy as np
from numpy.typing import NDArray

from ollama_tiering.system.files import fill, writer
from ollama_tiering.system.pagecache import forget

REQUEST_BYTES: Final = 8 << 20
_FLAGS: Final = os.O_RDONLY | os.O_CLOEXEC

Bytes = NDArray[np.uint8]


def touched(size_bytes: int) -> Bytes:
    """Memory whose pages are resident."""
    return np.ones(size_bytes, np.uint8)


def memcpy_seconds(source: Bytes, target: Bytes) -> float:
    """With one thread; the better of two runs."""
    return min(_timed_copy(source, target) for _ in range(2))


def _timed_copy(source: Bytes, target: Bytes) -> float:
    start = time.perf_counter()
    np.copyto(target, source)
    return time.perf_counter() - start


@contextlib.contextmanager
def direct(path: Path, flags: int) -> Iterator[int]:
    """A descriptor that bypasses the page cache, if the file system supports that."""
    try:
        fd = os.open(path, flags | getattr(os, "O_DIRECT", 0), 0o600)
    except OSError:
        fd = os.open(path, flags, 0o600)
    try:
        yield fd
    finally:
        os.close(fd)


def sequential_write_seconds(path: Path, size_bytes: int) -> float:
    """Writes one file of that many bytes in order; its space is allocated before, and it is synced
    after.
    """
    with memoryview(mmap.mmap(-1, REQUEST_BYTES)) as part:
        part[:] = os.urandom(REQUEST_BYTES)
        with direct(path, os.O_WRONLY | os.O_CREAT | os.O_CLOEXEC) as fd:
            start = time.perf_counter()
            os.posix_fallocate(fd, 0, size_bytes)
            write = writer(fd, past_cache=True)
            for offset in range(0, size_bytes, REQUEST_BYTES):
                write(offset, part[: min(REQUEST_BYTES, size_bytes - offset)])
            os.fsync(fd)
            return time.perf_counter() - start


def sequential_read_seconds(path: Path, size_bytes: int) -> float:
    """Reads the same file with one thread, into memory that is used again and again."""
    drop([path])
    with (
        memoryview(mmap.mmap(-1, REQUEST_BYTES)) as part,
        direct(path, _FLAGS) as fd,
    ):
        start = time.perf_counter()
        for offset in range(0, size_bytes, REQUEST_BYTES):
            fill(fd, offset, part[: min(REQUEST_BYTES, size_bytes - offset)])
        return time.perf_counter() - start


def drop(paths: Iterable[Path]) -> None:
    """Puts files into the state after a reboot: none of their pages is in memory."""
    for path in paths:
        fd = os.open(path, _FLAGS)
        try:
            os.fsync(fd)
            forget(fd)
        finally:
            os.close(fd)
