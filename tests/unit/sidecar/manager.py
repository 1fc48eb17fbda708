"""A stand-in for the service manager's end of the notify socket."""

from __future__ import annotations

import socket
import time
from collections.abc import Callable
from pathlib import Path
from types import TracebackType


class Manager:
    """Receives what a service says; `address` is what NOTIFY_SOCKET holds."""

    def __init__(self, root: Path) -> None:
        self.address = root / "notify"
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
        self._socket.bind(str(self.address))
        self.heard: list[str] = []

    def environment(self, watchdog_seconds: float) -> dict[str, str]:
        return {
            "NOTIFY_SOCKET": str(self.address),
            "WATCHDOG_USEC": str(int(watchdog_seconds * 1e6)),
        }

    def next(self, seconds: float) -> str | None:
        """None when nothing is said for so long."""
        self._socket.settimeout(max(seconds, 1e-3))
        try:
            said = self._socket.recv(4096).decode()
        except TimeoutError:
            return None
        self.heard.append(said)
        return said

    def wait(self, wanted: Callable[[str], bool], seconds: float = 20.0) -> str:
        end = time.monotonic() + seconds
        while (left := end - time.monotonic()) > 0:
            said = self.next(left)
            if said is not None and wanted(said):
                return said
        raise AssertionError(f"never said within {seconds} s; heard {self.heard}")

    def wait_silence(self, seconds: float, within: float = 20.0) -> None:
        """Until no sign of life was given for `seconds`."""
        end = time.monotonic() + within
        quiet_since = time.monotonic()
        while time.monotonic() - quiet_since < seconds:
            assert time.monotonic() < end, f"still alive; heard {self.heard[-5:]}"
            if self.next(0.05) == "WATCHDOG=1":
                quiet_since = time.monotonic()

    def __enter__(self) -> Manager:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._socket.close()


def is_ping(said: str) -> bool:
    return said == "WATCHDOG=1"
