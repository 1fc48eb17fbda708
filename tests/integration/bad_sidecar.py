"""A sidecar that says whatever it is told to."""

from __future__ import annotations

import contextlib
import socket
import threading
from collections.abc import Sequence
from pathlib import Path

from ollama_tiering.protocol.engine import messages as m
from ollama_tiering.protocol.engine.messages import Kind
from ollama_tiering.protocol.engine.wire import HEAD, MAX_HELLO_BYTES, frame, frame_head
from tests.integration.engine_program import SECONDS

WELCOME = frame(Kind.WELCOME, m.Welcome(bytes(32), 64, 1, 1000, 1000).pack())


class BadSidecar:
    """Greets, and gives the next of these answers to the first request of each connection."""

    def __init__(self, path: Path, answers: Sequence[bytes]) -> None:
        self._answers = iter(answers)
        self._listening = socket.socket(socket.AF_UNIX)
        self._listening.bind(str(path))
        self._listening.listen()
        self._thread = threading.Thread(target=self._serve, daemon=True)

    def __enter__(self) -> BadSidecar:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        with contextlib.suppress(OSError):
            self._listening.shutdown(socket.SHUT_RDWR)
        self._thread.join(SECONDS)
        self._listening.close()

    def _serve(self) -> None:
        with contextlib.suppress(OSError):
            while True:
                client, _ = self._listening.accept()
                threading.Thread(target=self._talk, args=(client,), daemon=True).start()

    def _talk(self, client: socket.socket) -> None:
        with client, contextlib.suppress(OSError, EOFError, StopIteration):
            _request(client)
            client.sendall(WELCOME)
            _request(client)
            client.sendall(next(self._answers))


class AnsweringSidecar(BadSidecar):
    """Gives one answer after the other, and notes that a connection which got some has ended."""

    def __init__(self, path: Path, answers: Sequence[bytes]) -> None:
        super().__init__(path, answers)
        self.hung_up = threading.Event()
        self.answers_given = 0

    def _talk(self, client: socket.socket) -> None:
        given = 0
        with client, contextlib.suppress(OSError, StopIteration):
            _request(client)
            client.sendall(WELCOME)
            try:
                while True:
                    _request(client)
                    client.sendall(next(self._answers))
                    given += 1
            except EOFError:
                if given:
                    self.answers_given = given
                    self.hung_up.set()


def _request(client: socket.socket) -> None:
    head = client.recv(HEAD.size, socket.MSG_WAITALL)
    if len(head) < HEAD.size:
        raise EOFError
    client.recv(frame_head(head, MAX_HELLO_BYTES)[0], socket.MSG_WAITALL)
