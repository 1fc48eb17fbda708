"""systemd's readiness protocol: one datagram per state; nothing without NOTIFY_SOCKET."""

from __future__ import annotations

import contextlib
import os
import socket


def notify(state: str) -> None:
    """`READY=1`, `STOPPING=1`, `WATCHDOG=1`. A service manager that has gone is no error."""
    address = os.environ.get("NOTIFY_SOCKET", "")
    if not address:
        return
    if address.startswith("@"):
        address = "\0" + address[1:]
    with (
        contextlib.suppress(OSError),
        socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM | socket.SOCK_CLOEXEC) as outgoing,
    ):
        outgoing.connect(address)
        outgoing.sendall(state.encode())


def watchdog_seconds() -> float | None:
    """Half the period in which the service manager expects a sign of life."""
    try:
        period = int(os.environ.get("WATCHDOG_USEC", "0")) / 1e6
        meant = os.environ.get("WATCHDOG_PID")
    except ValueError:
        return None
    if period <= 0 or (meant and meant != str(os.getpid())):
        return None
    return period / 2
