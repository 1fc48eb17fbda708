"""What an engine's own client does on the engine socket, in Python: for tests, benchmarks, and as a
model of the one in C++. One connection, one request at a time; not thread-safe.
"""

from __future__ import annotations

import os
import socket
from pathlib import Path
from typing import Final

from ollama_tiering.errors import ServiceError
from ollama_tiering.protocol.engine import messages as m
from ollama_tiering.protocol.engine.messages import Kind
from ollama_tiering.protocol.engine.wire import HEAD, MAX_REPLY_BYTES, frame, frame_head
from ollama_tiering.system.closing import Closing
from ollama_tiering.system.listener import require_own_listener

_HINT: Final = "is a sidecar running? `tiering sidecar`"


class EngineRefused(ServiceError):
    """The sidecar answered FAILED; `code` says why."""

    def __init__(self, failed: m.Failed) -> None:
        super().__init__(
            failed.message, hint="the engine socket's protocol is in the documentation"
        )
        self.code = failed.code


def ask_version(path: Path | str, *, timeout_seconds: float = 10.0) -> None:
    """EngineRefused, code VERSION, where another version is spoken there; ServiceError where nobody
    answers. The sidecar keeps nothing of it.
    """
    EngineClient(path, None, timeout_seconds=timeout_seconds).close()


class EngineClient(Closing):
    """Connects and says hello. ServiceError where nobody answers, or the answer is a refusal. Of an
    engine that is not tiered the sidecar hears why; it has nothing to ask for. Without a hello only
    the version is asked for.
    """

    def __init__(
        self, path: Path | str, hello: m.Hello | None, *, timeout_seconds: float = 10.0
    ) -> None:
        self._socket = socket.socket(socket.AF_UNIX)
        self._socket.settimeout(timeout_seconds)
        try:
            self._socket.connect(os.fspath(path))
            require_own_listener(self._socket, path)
            self.welcome: m.Welcome | None = None
            if hello is None:
                self._ask(Kind.HELLO, m.QUESTION, Kind.DONE)
            elif hello.unsupported:
                self._ask(Kind.HELLO, hello.pack(), Kind.DONE)
            else:
                answer = self._ask(Kind.HELLO, hello.pack(), Kind.WELCOME)
                self.welcome = m.Welcome.unpack(answer)
        except BaseException:
            self._socket.close()
            raise

    def match(self, request: m.EngineMatch) -> m.Matched:
        return m.Matched.unpack(self._ask(Kind.MATCH, request.pack(), Kind.MATCHED))

    def wait(self, lease_id: int) -> m.Matched:
        return m.Matched.unpack(self._ask(Kind.WAIT, m.EngineLease(lease_id).pack(), Kind.MATCHED))

    def release(self, lease_id: int) -> None:
        self._ask(Kind.RELEASE, m.EngineLease(lease_id).pack(), Kind.DONE)

    def plan(self, request: m.Plan) -> m.Planned:
        return m.Planned.unpack(self._ask(Kind.PLAN, request.pack(), Kind.PLANNED))

    def commit(self, request: m.Commit) -> m.Committed:
        return m.Committed.unpack(self._ask(Kind.COMMIT, request.pack(), Kind.COMMITTED))

    def damaged(self, request: m.Damaged) -> None:
        self._ask(Kind.DAMAGED, request.pack(), Kind.DONE)

    def finished(self, request: m.EngineFinished) -> None:
        self._ask(Kind.FINISHED, request.pack(), Kind.DONE)

    def close(self) -> None:
        self._socket.close()

    def _ask(self, kind: Kind, body: bytes, wanted: Kind) -> bytes:
        try:
            self._socket.sendall(frame(kind, body))
            body_bytes, answer = frame_head(self._take(HEAD.size), MAX_REPLY_BYTES)
            reply = self._take(body_bytes)
        except OSError as error:
            raise ServiceError(f"engine socket: {error}", hint=_HINT) from error
        if answer == Kind.FAILED:
            raise EngineRefused(m.Failed.unpack(reply))
        if answer != wanted:
            raise ServiceError(f"engine socket: answer {answer} to {kind.name}", hint=_HINT)
        return reply

    def _take(self, count: int) -> bytes:
        data = bytearray(count)
        view = memoryview(data)
        while view:
            if not (received := self._socket.recv_into(view)):
                raise ConnectionResetError("the sidecar hung up")
            view = view[received:]
        return bytes(data)
