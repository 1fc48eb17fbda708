"""The free-space floor: the cache never fills somebody's disk, whatever its budget allows.

The file system is asked at most once per `CACHE_SECONDS`; what was taken since is remembered. One
that does not answer is not written to, and nothing is evicted because of it. Thread-safe, but may
wait for the disk: never called under the store's lock.
"""

from __future__ import annotations

import logging
import os
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Final

log = logging.getLogger(__name__)

CACHE_SECONDS: Final = 0.5


class FreeSpace:
    """What may be written to the file system of `directory` before `min_free_percent` is left."""

    def __init__(
        self, directory: Path, min_free_percent: float, clock: Callable[[], float]
    ) -> None:
        self._directory = directory
        self._share = min_free_percent / 100
        self._clock = clock
        self._lock = threading.Lock()
        self._headroom_bytes: int | None = None
        self._asked: float | None = None
        self.short = False  # whether the last answer was below the floor

    def headroom_bytes(self, *, fresh: bool = False) -> int | None:
        """Bytes above the floor; negative when the disk is fuller than that; None: not known."""
        with self._lock:
            now = self._clock()
            if fresh or self._asked is None or not 0 <= now - self._asked < CACHE_SECONDS:
                self._headroom_bytes = self._ask()
                self._asked = now
            return self._headroom_bytes

    def take(self, taken_bytes: int) -> None:
        """Something was allocated since the file system was asked."""
        with self._lock:
            if self._headroom_bytes is not None:
                self._headroom_bytes -= taken_bytes

    def _ask(self) -> int | None:
        try:
            info = os.statvfs(self._directory)
        except OSError as error:
            log.warning("free space unknown: path=%s error=%s", self._directory, error)
            return None
        floor_bytes = int(info.f_blocks * info.f_frsize * self._share)
        headroom = info.f_bavail * info.f_frsize - floor_bytes
        if (headroom < 0) != self.short:
            self.short = headroom < 0
            log.warning(
                "disk %s the free-space floor: path=%s headroom_bytes=%d",
                "is below" if self.short else "is again above",
                self._directory,
                headroom,
            )
        return headroom
