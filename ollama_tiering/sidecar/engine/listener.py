"""The engine socket: a second listener beside gRPC's, for engines that speak no gRPC.

A thread for each connection: one that is slow, silent or waits for a disk keeps up nobody but
itself. Threads are daemons, and so few that their memory does not count. Who may connect is decided
as on the first socket: 0600 in a directory 0700, and every peer's uid is asked for besides.
"""

from __future__ import annotations

import contextlib
import logging
import os
import socket
import threading
import time
from pathlib import Path
from types import TracebackType
from typing import Final

from ollama_tiering.config import SOCKET_PATH_MAX_BYTES, SidecarConfig
from ollama_tiering.errors import ServiceError
from ollama_tiering.sidecar.engine.connection import Connection, Engines
from ollama_tiering.sidecar.held_socket import HeldSocket
from ollama_tiering.system.listener import peer
from ollama_tiering.system.quiet_log import QuietLog

log = logging.getLogger(__name__)
seldom = QuietLog(log)

MAX_CONNECTIONS: Final = 32
_SUFFIX: Final = ".engine"
_STOP_SECONDS: Final = 2.0
_NO_DESCRIPTORS_SECONDS: Final = 1.0  # until the next try to accept


def place(config: SidecarConfig) -> Path | None:
    """Of the engine socket. None: beside the first one, where its name would be too long."""
    if config.engine_socket is not None:
        return config.engine_socket
    path = config.socket_path.with_name(config.socket_path.name + _SUFFIX)
    return path if len(os.fsencode(path)) <= SOCKET_PATH_MAX_BYTES else None


class EngineSocket:
    """A context manager: listens within it. The caller holds the place (`hold_socket`)."""

    def __init__(self, held: HeldSocket, engines: Engines) -> None:
        self._held = held
        self._engines = engines
        self._allowed = {0, os.geteuid()}
        self._listening = socket.socket(socket.AF_UNIX)
        self._lock = threading.Lock()
        self._open: dict[threading.Thread, socket.socket] = {}
        self._stopping = threading.Event()
        self._thread = threading.Thread(target=self._accept_all, name="engines", daemon=True)

    def __enter__(self) -> EngineSocket:
        bind_privately(self._listening, self._held)
        self._thread.start()
        log.info("engine socket: path=%s", self._held.path)
        return self

    async def listen_again(self) -> None:
        """On another socket of the same name. Engines that are connected stay so."""
        listening = socket.socket(socket.AF_UNIX)
        try:
            bind_privately(listening, self._held)
        except BaseException:
            listening.close()
            raise
        before, self._listening = self._listening, listening
        _shut(before)

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        """Hangs up on everybody; waits a little for what is being answered."""
        self._stopping.set()
        _shut(self._listening)
        with self._lock:
            threads = list(self._open)
            for client in self._open.values():
                _shut(client)
        deadline = time.monotonic() + _STOP_SECONDS
        for thread in (self._thread, *threads):
            thread.join(max(0.0, deadline - time.monotonic()))
        self._listening.close()

    def _accept_all(self) -> None:
        while not self._stopping.is_set():
            listening = self._listening
            try:
                client, _ = listening.accept()
            except OSError as error:
                if self._stopping.is_set():
                    return
                if listening is not self._listening:  # it was lost
                    listening.close()
                    continue
                seldom.warning("accept", "no engine accepted: error=%s", error)
                self._stopping.wait(_NO_DESCRIPTORS_SECONDS)
                continue
            self._begin(client)

    def _begin(self, client: socket.socket) -> None:
        """Or hangs up on it: a stranger, or one too many."""
        with contextlib.suppress(OSError):
            pid, uid = peer(client)
            if uid not in self._allowed:
                seldom.warning(f"uid {uid}", "peer refused: uid=%d pid=%d", uid, pid)
            elif self._run(client, pid):
                return
            else:
                said = "engine refused: pid=%d reason=%d connections are open already"
                seldom.warning("connections", said, pid, MAX_CONNECTIONS)
        client.close()

    def _run(self, client: socket.socket, pid: int) -> bool:
        """In a thread of its own; whether there was room for one."""
        thread = threading.Thread(
            target=self._serve, args=(client, pid), name=f"engine-{pid}", daemon=True
        )
        with self._lock:
            if len(self._open) >= MAX_CONNECTIONS or self._stopping.is_set():
                return False
            self._open[thread] = client
        try:
            thread.start()
        except RuntimeError:  # the system has no more threads
            with self._lock:
                del self._open[thread]
            return False
        return True

    def _serve(self, client: socket.socket, pid: int) -> None:
        try:
            Connection(client, pid, self._engines).run()
        except Exception:
            log.exception("connection of an engine failed")
        finally:
            with self._lock:
                del self._open[threading.current_thread()]
            client.close()


def bind_privately(listening: socket.socket, held: HeldSocket) -> None:
    """Never open to others: nobody can connect before it listens. ServiceError."""
    try:
        listening.bind(held.address())
        listening.listen(MAX_CONNECTIONS)
        held.show()
    except OSError as error:
        raise ServiceError(
            f"cannot listen on {held.path}: {error}",
            hint="name another socket: sidecar.engine_socket",
        ) from None


def _shut(client: socket.socket) -> None:
    with contextlib.suppress(OSError):
        client.shutdown(socket.SHUT_RDWR)
