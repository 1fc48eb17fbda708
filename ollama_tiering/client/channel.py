"""The connection of Python's clients to a sidecar: gRPC over a socket of which it is known whose it
is.
"""

from __future__ import annotations

import contextlib
import os
import threading
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Final

import grpc

from ollama_tiering.config import APP_NAME
from ollama_tiering.errors import ServiceError
from ollama_tiering.protocol import calls as rpc
from ollama_tiering.protocol.limits import MAX_MESSAGE_BYTES
from ollama_tiering.system.closing import Closing
from ollama_tiering.system.listener import OwnListener

SERVICE_DIR: Final = Path("/run") / APP_NAME  # systemd makes it, for the system service's user

_OPTIONS: Final = (
    ("grpc.max_receive_message_length", MAX_MESSAGE_BYTES),
    ("grpc.enable_http_proxy", 0),
    # Connections are found by their address, which here is a descriptor's: it means another socket
    # once the descriptor is another one.
    ("grpc.use_local_subchannel_pool", 1),
)


class SidecarChannel(Closing):
    """Connects when it is used. After the socket was replaced, as by a restart, it asks anew who
    listens. With `administers`, root may ask the system service, which has a user of its own.
    Thread-safe.
    """

    def __init__(
        self,
        path: Path,
        options: Sequence[tuple[str, Any]] = (),
        *,
        administers: bool = False,
    ) -> None:
        self._path = path
        self._options = [*_OPTIONS, *options]
        self._administers = administers
        self._lock = threading.Lock()
        self._listener: OwnListener | None = None
        self._channels: list[grpc.Channel] = []  # the last one is used
        self._stub: Any = None
        self._closed = False

    def stub(self) -> Any:
        """ServiceError if nobody listens, or somebody who is not to be asked. ValueError once it is
        closed.
        """
        with self._lock:
            if self._closed:
                raise ValueError("the connection to the sidecar is closed")
            if self._listener is None or not self._listener.has_its_name():
                self._connect()
            return self._stub

    def close(self) -> None:
        with self._lock:
            self._closed = True
            self._end(0)

    def _connect(self) -> None:
        also = service_uid(self._path) if self._administers else None
        try:
            listener = OwnListener(self._path, also=also)
        except OSError as error:
            raise ServiceError(
                f"no sidecar answers on {self._path}: {error.strerror or error}",
                hint="is a sidecar running? `tiering sidecar`",
            ) from None
        self._end(1)  # calls on the one before may still be answered
        self._listener = listener
        self._channels.append(
            grpc.insecure_channel(f"unix:{listener.address}", options=self._options)
        )
        self._stub = rpc.BlockStoreStub(self._channels[-1])

    def _end(self, keep: int) -> None:
        while len(self._channels) > keep:
            self._channels.pop(0).close()
        if self._listener is not None:
            self._listener.close()
            self._listener = None


def service_uid(path: Path) -> int | None:
    """Whose sidecar root may ask besides its own: the one for which root has made the directory."""
    if os.geteuid() or path.parent != SERVICE_DIR:
        return None
    with contextlib.suppress(OSError):
        return SERVICE_DIR.lstat().st_uid
    return None
