"""Physical bytes of what a tier directory holds beside blocks: directories, descriptions, index.

Known by place, so that they can be counted without looking at the disk. Thread-safe; nothing here
waits for a disk.
"""

from __future__ import annotations

import os
import threading
from typing import Final

BLOCK_UNIT: Final = 512  # of st_blocks, whatever the file system


def physical_bytes(info: os.stat_result) -> int:
    return info.st_blocks * BLOCK_UNIT


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
