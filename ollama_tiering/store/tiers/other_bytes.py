"""Physical bytes of what a tier directory holds beside blocks: directories, descriptions, index.

Known by place, so that they can be counted without looking at the disk. Thread-safe; `OtherBytes`
never waits for a disk.
"""

from __future__ import annotations

import contextlib
import os
import threading
from pathlib import Path
from typing import Final

from ollama_tiering.system.directories import entries

BLOCK_UNIT: Final = 512  # of st_blocks, whatever the file system


def physical_bytes(info: os.stat_result) -> int:
    return info.st_blocks * BLOCK_UNIT


def files_bytes(directory: Path) -> int:
    """Of a directory and the files in it, not of what is below. Waits for the disk."""
    total = physical_bytes(directory.stat())
    for entry in entries(directory):
        with contextlib.suppress(FileNotFoundError):
            if entry.is_file(follow_symlinks=False):
                total += physical_bytes(entry.stat(follow_symlinks=False))
    return total


class OtherBytes:
    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._bytes: dict[tuple[str, ...], int] = {}
        self.total = 0

    def __contains__(self, place: tuple[str, ...]) -> bool:
        return place in self._bytes

    def note(self, place: tuple[str, ...], stored_bytes: int) -> int:
        """By how much it has grown."""
        with self._lock:
            grown = stored_bytes - self._bytes.get(place, 0)
            self.total += grown
            self._bytes[place] = stored_bytes
        return grown

    def forget(self, place: tuple[str, ...]) -> None:
        with self._lock:
            self.total -= self._bytes.pop(place, 0)
