"""HTTP on loopback for programs that watch the sidecar. Off without a port.

One thread with an event loop of its own serves it. A connection is good for one request. The number
of connections is bounded, and so is the time of each, from its first byte to its last. So a client
that sends nothing, sends slowly, or does not read delays nobody. If there are too many connections,
a new one replaces the oldest, and an honest client is answered within milliseconds.
"""

from __future__ import annotations

import asyncio
import itertools
import logging
import socket
import threading
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass
from http import HTTPStatus
from types import TracebackType
from typing import Final

import h11

log = logging.getLogger(__name__)

LOOPBACK: Final = "127.0.0.1"
MAX_CONNECTIONS: Final = 32
CLIENT_SECONDS: Final = 5.0  # for the whole of a connection
_MAX_HEAD_BYTES: Final = 16 << 10  # of a request
_READ_BYTES: Final = 16 << 10
_NO_DESCRIPTORS_SECONDS: Final = 1.0  # until the next try to accept
_STOP_SECONDS: Final = 1.0


@dataclass(frozen=True, slots=True)
class HttpRequest:
    path: str
    query: str
    headers: Mapping[str, str]  # names in lower case


@dataclass(frozen=True, slots=True)
class HttpAnswer:
    status: int
    body: bytes
    headers: tuple[tuple[str, str], ...] = (("Content-Type", "text/plain; charset=utf-8"),)


Page = Callable[[HttpRequest], Awaitable[HttpAnswer]]


def text(status: int, line: str) -> HttpAnswer:
    return HttpAnswer(status, f"{line}\n".encode())


class Endpoint:
    """A context manager. If the port is taken, it only warns: the sidecar is
    there for its blocks.
    """

    def __init__(
        self, pages: Mapping[str, Page], port: int, *, client_seconds: float = CLIENT_SECONDS
    ) -> None:
        self._pages = pages
        self._port = port
        self._client_seconds = client_seconds
        # In the order they came.
        self._open: dict[asyncio.Task[None], socket.socket] = {}
        self._loop: asyncio.AbstractEventLoop | None = None
        self._stop = asyncio.Event()
        self._thread: threading.Thread | None = None

    def __enter__(self) -> Endpoint:
        if not self._port:
            return self
        try:
            listening = socket.create_server((LOOPBACK, self._port))
        except OSError as error:
            log.warning("metrics not served: port=%d error=%s", self._port, error)
            return self
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(
            target=self._run, args=(self._loop, listening), name="metrics", daemon=True
        )
        self._thread.start()
        log.info("metrics: url=http://%s:%d/metrics", LOOPBACK, self._port)
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if self._thread is not None and self._loop is not None:
            self._loop.call_soon_threadsafe(self._stop.set)
            self._thread.join(_STOP_SECONDS)

    def _run(self, loop: asyncio.AbstractEventLoop, listening: socket.socket) -> None:
        with asyncio.Runner(loop_factory=lambda: loop) as runner:
            runner.run(self._serve(listening))

    async def _serve(self, listening: socket.socket) -> None:
        listening.setblocking(False)
        with listening:
            self._listen(listening)
            await self._stop.wait()
            asyncio.get_running_loop().remove_reader(listening)
        for task in self._open:
            task.cancel()
        await asyncio.gather(*self._open, return_exceptions=True)

    def _listen(self, listening: socket.socket) -> None:
        if listening.fileno() >= 0:
            asyncio.get_running_loop().add_reader(listening, self._accept, listening)

    def _accept(self, listening: socket.socket) -> None:
        """Not a coroutine, so that a connection is known as soon as it is accepted, even while the
        endpoint ends.
        """
        loop = asyncio.get_running_loop()
        try:
            client, _ = listening.accept()
        except BlockingIOError:
            return
        except OSError as error:
            log.warning("metrics: no connection accepted: error=%s", error)
            loop.remove_reader(listening)
            loop.call_later(_NO_DESCRIPTORS_SECONDS, self._listen, listening)
            return
        client.setblocking(False)
        task = loop.create_task(self._client(client))
        self._open[task] = client
        task.add_done_callback(self._ended)
        too_many = max(0, len(self._open) - MAX_CONNECTIONS)
        for oldest in itertools.islice(self._open, too_many):
            oldest.cancel()

    def _ended(self, task: asyncio.Task[None]) -> None:
        self._open.pop(task).close()  # also where the task never began

    async def _client(self, client: socket.socket) -> None:
        reader, writer = await asyncio.open_connection(sock=client)
        try:
            async with asyncio.timeout(self._client_seconds):
                await self._converse(reader, writer)
        except (TimeoutError, OSError):
            pass
        except Exception:
            log.exception("metrics request failed")
        finally:
            writer.transport.abort()

    async def _converse(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        connection = h11.Connection(h11.SERVER, max_incomplete_event_size=_MAX_HEAD_BYTES)
        with_body = True
        try:
            request = await _received(connection, reader)
            if request is None:
                return
            with_body = request.method != b"HEAD"
            answer = await self._answer(request)
        except h11.RemoteProtocolError as error:
            answer = text(error.error_status_hint, "no HTTP request")
        writer.write(_as_bytes(connection, answer, with_body=with_body))
        writer.write_eof()
        while await reader.read(_READ_BYTES):  # a reset would take the answer back from the client
            pass

    async def _answer(self, request: h11.Request) -> HttpAnswer:
        path, _, query = request.target.decode("ascii", "replace").partition("?")
        page = self._pages.get(path)
        if page is None:
            return text(HTTPStatus.NOT_FOUND, "there are: " + ", ".join(self._pages))
        if request.method not in (b"GET", b"HEAD"):
            refused = text(HTTPStatus.METHOD_NOT_ALLOWED, "GET or HEAD")
            return HttpAnswer(
                refused.status, refused.body, (*refused.headers, ("Allow", "GET, HEAD"))
            )
        headers = {name.decode("latin-1"): v.decode("latin-1") for name, v in request.headers}
        return await page(HttpRequest(path, query, headers))


async def _received(connection: h11.Connection, reader: asyncio.StreamReader) -> h11.Request | None:
    """The head of the request; what may follow is not read. None if the client has gone."""
    while True:
        event = connection.next_event()
        if isinstance(event, h11.Request):
            return event
        if event is not h11.NEED_DATA:
            return None
        connection.receive_data(await reader.read(_READ_BYTES))


def _as_bytes(connection: h11.Connection, answer: HttpAnswer, *, with_body: bool) -> bytes:
    headers = [*answer.headers, ("Content-Length", str(len(answer.body))), ("Connection", "close")]
    reason = HTTPStatus(answer.status).phrase
    events: list[h11.Event] = [
        h11.Response(status_code=answer.status, headers=headers, reason=reason),
        *([h11.Data(data=answer.body)] if with_body else []),
        h11.EndOfMessage(),
    ]
    return b"".join(connection.send(event) or b"" for event in events)
