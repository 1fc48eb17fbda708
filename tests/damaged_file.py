"""A file that a test damages as a disk or a program would, and puts right as a pull does."""

from __future__ import annotations

import os
import time
from pathlib import Path


def flip_bit(path: Path, data: bytes, at: int) -> None:
    """Flips a bit of the byte there, in place; size and time stay. `data` is what was right."""
    before = path.stat()
    time.sleep(0.02)  # times of change go by ticks
    with path.open("r+b") as file:
        file.seek(at)
        file.write(bytes((data[at] ^ 4,)))
    os.utime(path, ns=(before.st_atime_ns, before.st_mtime_ns))


def put_right(path: Path, data: bytes) -> None:
    """Another file under the same name, with the same time."""
    before = path.stat()
    partial = path.with_suffix(".partial")
    partial.write_bytes(data)
    os.utime(partial, ns=(before.st_atime_ns, before.st_mtime_ns))
    partial.rename(path)
