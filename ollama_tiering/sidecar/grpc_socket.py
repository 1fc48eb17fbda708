"""gRPC's servers on one socket: the first, and one more each time the socket was lost, because a
server cannot listen anew.
"""

from __future__ import annotations

import asyncio
from typing import Any, Final

import grpc.aio

from ollama_tiering.errors import ServiceError
from ollama_tiering.protocol.limits import MAX_MESSAGE_BYTES
from ollama_tiering.sidecar.entrance import Entrance
from ollama_tiering.sidecar.held_socket import HeldSocket
from ollama_tiering.system.listener import grpc_address

_OPTIONS: Final = (
    ("grpc.max_receive_message_length", MAX_MESSAGE_BYTES),
    ("grpc.max_send_message_length", MAX_MESSAGE_BYTES),
    ("grpc.so_reuseport", 0),
)
_OLD_SECONDS: Final = 60.0  # calls that were begun before may go on so long


class GrpcSocket:
    """To be used on the event loop only."""

    def __init__(self, held: HeldSocket, entrance: Entrance) -> None:
        self._held = held
        self._entrance = entrance
        self._server: Any = None
        self._ending: set[asyncio.Task[None]] = set()

    async def listen(self) -> None:
        """Also again. Clients of the server before are told to connect anew."""
        server = grpc.aio.server(options=_OPTIONS)
        server.add_generic_rpc_handlers((self._entrance,))
        _bind(server, self._held)
        await server.start()
        self._held.show()
        before, self._server = self._server, server
        if before is not None:
            ending = asyncio.create_task(before.stop(_OLD_SECONDS))
            self._ending.add(ending)
            ending.add_done_callback(self._ending.discard)

    async def stop(self, grace_seconds: float) -> None:
        for ending in self._ending:
            ending.cancel()
        await self._server.stop(grace_seconds)


def _bind(server: Any, held: HeldSocket) -> None:
    """Others may not connect, not even before the mode is set: the process's umask is 077."""
    try:
        server.add_insecure_port(grpc_address(held.address()))
    except RuntimeError as error:
        raise ServiceError(
            f"cannot listen on {held.path}: {error}", hint="name another socket with --socket"
        ) from None
