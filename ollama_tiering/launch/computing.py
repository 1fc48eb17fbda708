"""Whether a server's models compute, by the time of processors that their processes take."""

from __future__ import annotations

import contextlib
from dataclasses import dataclass, field
from typing import Final

import psutil

_BUSY_SHARE: Final = 0.05  # of one core, from one look to the next


@dataclass(slots=True)
class Computing:
    """Compares each look with the one before it. Not thread-safe."""

    _work: dict[int, float] = field(default_factory=dict)
    _looked: float = 0.0

    @property
    def has_models(self) -> bool:
        """Whether there was one at the last look."""
        return bool(self._work)

    def look(self, server_pid: int, now: float) -> bool:
        """Whether one of them computes. `now`: seconds of any clock."""
        before, self._work = self._work, _processor_seconds(server_pid)
        seconds, self._looked = now - self._looked, now
        return any(
            work - before.get(pid, 0.0) > _BUSY_SHARE * seconds for pid, work in self._work.items()
        )


def _processor_seconds(server_pid: int) -> dict[int, float]:
    """Reads them for each child."""
    found: dict[int, float] = {}
    with contextlib.suppress(psutil.Error):
        for child in psutil.Process(server_pid).children(recursive=True):
            with contextlib.suppress(psutil.Error):
                times = child.cpu_times()
                found[child.pid] = times.user + times.system
    return found
