"""`tiering recheck` beside `tiering up`, when nobody asks for anything: one conversation at a time,
at the lowest priority, and ended at once when somebody asks.
"""

from __future__ import annotations

import contextlib
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Final

import psutil

from ollama_tiering import config
from ollama_tiering.errors import TieringError
from ollama_tiering.launch.block_service import ask
from ollama_tiering.launch.process import Child, package_path, rotate, start
from ollama_tiering.protocol.pb import administration_pb2 as adm

_OF_THE_LAST: Final = 20  # conversations, one is chosen
_TOKENS: Final = 2048
_STOP_SECONDS: Final = 5.0


class IdleRecheck:
    """Is called now and then. `every_seconds` 0: it does nothing. `close` ends what runs."""

    def __init__(
        self,
        socket: Path,
        every_seconds: float,
        idle_seconds: float,
        *,
        begin: Callable[[Path], Child] | None = None,
        look: Callable[[Path], adm.StatResponse | None] = ask,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._socket = socket
        self._every_seconds = every_seconds
        self._idle_seconds = idle_seconds
        self._begin = begin or _begin
        self._look = look
        self._clock = clock
        self._requests: dict[int, int] = {}  # of each runner, by process id
        self._look_ups = 0
        self._asked_at = self._done_at = clock()
        self._child: Child | None = None

    def __call__(self) -> None:
        if not self._every_seconds or (answer := self._look(self._socket)) is None:
            return
        now = self._clock()
        own = _below(self._child.pid) if self._child is not None else frozenset()
        requests = {one.pid: one.requests for one in answer.runners if one.pid not in own}
        look_ups, self._look_ups = self._look_ups, answer.has_calls  # a prompt begins with one
        ended = any(self._requests.get(pid) != count for pid, count in requests.items())
        if ended or look_ups != answer.has_calls:
            self._asked_at = now
            self.close()
        self._requests = requests
        if self._child is not None and not self._child.running:
            self._child = None
        loaded = any(one.tiered for one in answer.runners if one.pid in requests)
        idle = now - self._asked_at >= self._idle_seconds
        due = now - self._done_at >= self._every_seconds
        if loaded and idle and due and self._child is None:
            self._done_at = now
            with contextlib.suppress(TieringError, OSError):
                self._child = self._begin(self._socket)

    def close(self) -> None:
        """What runs ends at once: its second llama-server has nothing to lose."""
        child, self._child = self._child, None
        if child is None:
            return
        for pid in _below(child.pid):
            with contextlib.suppress(psutil.Error):
                psutil.Process(pid).kill()
        child.stop(seconds=_STOP_SECONDS)


def _begin(socket: Path) -> Child:
    return start(
        "a recheck",
        *(sys.executable, "-m", "ollama_tiering", "recheck", "--socket", socket),
        *("--last", str(_OF_THE_LAST), "--sample", "1", "--tokens", str(_TOKENS)),
        log=rotate(config.state_dir() / "logs" / "idle-recheck.log"),
        env=package_path(),
        leashed=True,
    )


def _below(pid: int) -> frozenset[int]:
    try:
        return frozenset(one.pid for one in psutil.Process(pid).children(recursive=True))
    except psutil.Error:
        return frozenset()
