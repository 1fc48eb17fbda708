"""Sockets that lead to the sidecar's and pass its answers on slowly, or only when told to."""

from __future__ import annotations

import contextlib
import socket
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

from tests.sidecar import SidecarProcess

Pass = Callable[[socket.socket, socket.socket], None]  # from the sidecar, to the client


@contextlib.contextmanager
def trickling(
    daemon: SidecarProcess, path: Path, *, bytes_a_time: int, pause_seconds: float
) -> Iterator[Path]:
    """Passes answers on a few bytes at a time."""
    over = threading.Event()

    def answers(sidecar: socket.socket, client: socket.socket) -> None:
        while not over.wait(pause_seconds):
            client.sendall(sidecar.recv(bytes_a_time))

    with _relayed(daemon, path, answers):
        try:
            yield path
        finally:
            over.set()


@contextlib.contextmanager
def dammed(daemon: SidecarProcess, path: Path, *, first_bytes: int) -> Iterator[threading.Event]:
    """Of each connection, passes the first bytes on, and the rest when the event is set.

    A client that merely does not ask for the next message still takes in what its transport's
    window holds, and gRPC widens that up to everything a fast sidecar sends.
    """
    opened = threading.Event()

    def answers(sidecar: socket.socket, client: socket.socket) -> None:
        client.sendall(sidecar.recv(first_bytes))
        opened.wait()
        while data := sidecar.recv(1 << 16):
            client.sendall(data)

    with _relayed(daemon, path, answers):
        try:
            yield opened
        finally:
            opened.set()


@contextlib.contextmanager
def _relayed(daemon: SidecarProcess, path: Path, answers: Pass) -> Iterator[None]:
    with contextlib.ExitStack() as held:
        listener = held.enter_context(socket.socket(socket.AF_UNIX))
        listener.bind(str(path))
        listener.listen()

        def serve() -> None:
            with contextlib.suppress(OSError):
                while True:
                    client, _ = listener.accept()
                    held.enter_context(client)
                    sidecar = held.enter_context(socket.socket(socket.AF_UNIX))
                    sidecar.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
                    sidecar.connect(str(daemon.socket))
                    for ends in ((_requests, client, sidecar), (answers, sidecar, client)):
                        threading.Thread(target=_until_closed, args=ends, daemon=True).start()

        thread = threading.Thread(target=serve, daemon=True)
        thread.start()
        try:
            yield
        finally:
            listener.shutdown(socket.SHUT_RDWR)
            thread.join(5)


def _requests(client: socket.socket, sidecar: socket.socket) -> None:
    while data := client.recv(1 << 16):
        sidecar.sendall(data)


def _until_closed(direction: Pass, source: socket.socket, target: socket.socket) -> None:
    with contextlib.suppress(OSError):
        direction(source, target)
        target.shutdown(socket.SHUT_WR)
