"""Directories of a test's own beside pytest's: short ones, and ones in memory."""

from __future__ import annotations

import contextlib
import os
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

TMPFS = Path("/dev/shm")


@contextlib.contextmanager
def short_directory(*, in_memory: bool = False) -> Iterator[Path]:
    """Where a socket can lie: its path has at most 107 bytes, and pytest's folders are deep. With
    `in_memory` on tmpfs, if there is one. Removed at the end.
    """
    place = TMPFS if in_memory and os.access(TMPFS, os.W_OK) else None
    with tempfile.TemporaryDirectory(prefix="kvt-", dir=place) as directory:
        yield Path(directory)


@contextlib.contextmanager
def tmpfs_directory() -> Iterator[Path]:
    """On tmpfs, where directories take no blocks. The test is skipped where there is none."""
    if not TMPFS.is_dir():
        pytest.skip("no tmpfs at /dev/shm")
    with short_directory(in_memory=True) as directory:
        yield directory
