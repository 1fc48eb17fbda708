"""How much clients may keep open, and how long a client may keep the sidecar waiting.

A call beyond a bound is refused with RESOURCE_EXHAUSTED, and a client that is too slow gets
DEADLINE_EXCEEDED; others are served meanwhile. To be used on the event loop only.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Awaitable, Iterator
from typing import Any, Final

import grpc.aio

from ollama_tiering.config import MIB, memory_limit
from ollama_tiering.protocol.statuses import ClientTooSlow
from ollama_tiering.store.errors import NoRoom

Context = Any  # grpc.aio.ServicerContext; its stubs lack the type parameters used here

MAX_PUT_STREAMS: Final = 256
MAX_GET_STREAMS: Final = 256
# Each takes up to 6 MiB of memory while its client does not read: the part as it was read, as a
# message, and as bytes on their way.
MAX_INLINE_GETS: Final = max(1, min(16, memory_limit().limit_bytes // (128 * MIB)))
MAX_TOOL_STREAMS: Final = 16  # a listing is as long as the store has blocks


class Slots:
    """How many calls of one kind may be open at once."""

    def __init__(self, what: str, most: int) -> None:
        self._what = what
        self._most = most
        self._taken = 0

    @contextlib.contextmanager
    def taken(self) -> Iterator[None]:
        """NoRoom if no slot is left."""
        if self._taken >= self._most:
            raise NoRoom(f"{self._most} {self._what} are open already")
        self._taken += 1
        try:
            yield
        finally:
            self._taken -= 1


def in_seconds(seconds: float) -> float:
    """A deadline, for `sent` and `received`."""
    return asyncio.get_running_loop().time() + seconds


async def begun(context: Context, deadline: float) -> None:
    """Sends the headers at once. Otherwise gRPC sends them with the first message, and cannot end
    the call (`end`) until the client has taken that message. ClientTooSlow.
    """
    await _taken(context.send_initial_metadata(()), deadline)


async def sent(context: Context, message: object, deadline: float) -> None:
    """Waits until the client's end of the connection takes the message. ClientTooSlow."""
    await _taken(context.write(message), deadline)


async def _taken(sending: Awaitable[None], deadline: float) -> None:
    try:
        async with asyncio.timeout_at(deadline):
            await sending
    except TimeoutError:
        raise ClientTooSlow("the answer was not read in time") from None
    except grpc.aio.InternalError:  # the client has gone
        raise asyncio.CancelledError from None


async def received(context: Context, deadline: float) -> Any:
    """The next message; None after the client's last one. ClientTooSlow."""
    try:
        async with asyncio.timeout_at(deadline):
            message = await context.read()
    except TimeoutError:
        raise ClientTooSlow("no message came in time") from None
    return None if message is grpc.aio.EOF else message  # type: ignore[attr-defined]
