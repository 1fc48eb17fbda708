"""A log line that a client can cause as often as it likes: said at once, then once a minute.

The line after a pause says how many like it were left out. Thread-safe.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable
from typing import Final

_PAUSE_SECONDS: Final = 60.0
_MAX_KINDS: Final = 256  # remembered: a kind may contain what a client made up


class QuietLog:
    def __init__(self, log: logging.Logger, clock: Callable[[], float] = time.monotonic) -> None:
        self._log = log
        self._clock = clock
        self._lock = threading.Lock()
        self._kinds: dict[str, tuple[float, int]] = {}  # when last said, left out since then

    def warning(self, kind: str, message: str, *args: object) -> None:
        """`message` and `args` as for logging; lines of one kind stand for each other."""
        now = self._clock()
        with self._lock:
            said, left_out = self._kinds.pop(kind, (-_PAUSE_SECONDS, 0))
            quiet = now - said < _PAUSE_SECONDS
            self._kinds[kind] = (said, left_out + 1) if quiet else (now, 0)
            if len(self._kinds) > _MAX_KINDS:
                del self._kinds[next(iter(self._kinds))]
        if quiet:
            return
        if left_out:
            message, args = message + " (and %d more since the last such line)", (*args, left_out)
        self._log.warning(message, *args)
