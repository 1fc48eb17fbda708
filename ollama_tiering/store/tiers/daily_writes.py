"""Bytes written to the local disk today, in a small file that survives restarts, kills and power
cuts.

The count in the file is always ahead of what was written, by at most `_AHEAD_BYTES` and a small
part of the limit. So a sidecar that is killed has used up too much of its day, never too little.
The count is not in the index, because the index may be thrown away. The day is a UTC date. A clock
that jumps back does not end the day. A clock that jumps forward does, but within one process two
days begin at least `_SHORTEST_DAY_SECONDS` apart by the monotonic clock.
"""

from __future__ import annotations

import contextlib
import json
import logging
import os
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Final

from ollama_tiering.store.tiers.contract import Tier
from ollama_tiering.store.tiers.names import WRITTEN_NAME
from ollama_tiering.system.directories import sync_directory
from ollama_tiering.system.lacking import sync

log = logging.getLogger(__name__)


_AHEAD_BYTES: Final = 64 << 20
_AHEAD_PARTS: Final = 64
_SHORTEST_DAY_SECONDS: Final = 12 * 3600.0
_DAY_SECONDS: Final = 86400
_MOST_BYTES: Final = 1 << 60
_FILE_LIMIT_BYTES: Final = 4096


class DailyWrites:
    """Thread-safe. With `limit_bytes` 0 writes are counted but not limited; with `path` None the
    count is only in memory.
    """

    def __init__(
        self,
        path: Path | None,
        limit_bytes: int = 0,
        *,
        clock: Callable[[], float] = time.monotonic,
        wall_clock: Callable[[], float] = time.time,
    ) -> None:
        self.limit_bytes = limit_bytes
        self._path = path
        self._clock = clock
        self._wall_clock = wall_clock
        self._lock = threading.Lock()
        self._began: float | None = None  # clock at the last change of day seen by this process
        self._day, self._written_bytes = self._load()
        self._saved_bytes = self._written_bytes

    @classmethod
    def of(
        cls, tiers: Sequence[tuple[Tier, int]], limit_bytes: int, wall_clock: Callable[[], float]
    ) -> DailyWrites:
        """The count lies in the directory of the tier whose disk it protects."""
        worn = [tier.directory for tier, _ in tiers if tier.wears_disk]
        path = worn[0] / WRITTEN_NAME if worn and worn[0] is not None else None
        return cls(path, limit_bytes, wall_clock=wall_clock)

    @property
    def written_bytes(self) -> int:
        self._change_day()
        return self._written_bytes

    @property
    def exhausted(self) -> bool:
        """Whether a block of any size would be refused. Does not wait."""
        return bool(self.limit_bytes) and self.written_bytes >= self.limit_bytes

    def charge(self, written_bytes: int) -> bool:
        """Call it before writing. False: nothing more may be written today."""
        with self._lock:
            self._change_day()
            if self.limit_bytes and self._written_bytes + written_bytes > self.limit_bytes:
                return False
            self._written_bytes += written_bytes
            if self._written_bytes > self._saved_bytes:
                self._save(self._written_bytes + self._ahead_bytes())
            return True

    def refund(self, written_bytes: int) -> None:
        """Takes back a charge for something that was not written."""
        with self._lock:
            self._written_bytes = max(0, self._written_bytes - written_bytes)

    def close(self) -> None:
        """Writes the exact count to the file."""
        with self._lock:
            if self._saved_bytes != self._written_bytes:
                self._save(self._written_bytes)

    def _ahead_bytes(self) -> int:
        if not self.limit_bytes:
            return _AHEAD_BYTES
        left = self.limit_bytes - self._written_bytes
        return max(0, min(_AHEAD_BYTES, self.limit_bytes // _AHEAD_PARTS, left))

    def _change_day(self) -> None:
        day = int(self._wall_clock() // _DAY_SECONDS)
        if day < self._day:  # the clock was ahead when it was set: the count stays, for today
            self._day = day
        elif day > self._day:
            now = self._clock()
            if self._began is not None and now - self._began < _SHORTEST_DAY_SECONDS:
                return
            self._day, self._written_bytes, self._began = day, 0, now
            self._saved_bytes = 0

    def _load(self) -> tuple[int, int]:
        today = int(self._wall_clock() // _DAY_SECONDS)
        if self._path is None:
            return today, 0
        try:
            fd = os.open(self._path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
            with os.fdopen(fd, "rb") as file:
                document = json.loads(file.read(_FILE_LIMIT_BYTES))
            day, written_bytes = int(document["day"]), int(document["written_bytes"])
        except FileNotFoundError:
            return today, 0
        except (OSError, ValueError, KeyError, TypeError) as error:
            log.warning("count of today's writes lost: path=%s error=%s", self._path, error)
            return today, 0
        return min(day, today), min(max(0, written_bytes), _MOST_BYTES)

    def _save(self, written_bytes: int) -> None:
        """Best effort: a disk that refuses this file refuses blocks too."""
        self._saved_bytes = written_bytes
        if self._path is None:
            return
        temporary = self._path.with_name(self._path.name + ".tmp")
        try:
            temporary.unlink(missing_ok=True)
            fd = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
            with os.fdopen(fd, "w", encoding="ascii") as file:
                json.dump({"day": self._day, "written_bytes": written_bytes}, file)
                file.flush()
                sync(fd)
            temporary.rename(self._path)
            sync_directory(self._path.parent)
        except OSError as error:
            log.warning("count of today's writes not kept: path=%s error=%s", self._path, error)
            with contextlib.suppress(OSError):
                temporary.unlink(missing_ok=True)
