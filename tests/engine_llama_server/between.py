"""Between an engine and its sidecar: answers that come late, or that are none."""

from __future__ import annotations

import contextlib
import socket
import struct
import threading
import time
from pathlib import Path
from typing import Self

from ollama_tiering.protocol.engine import messages as m
from ollama_tiering.protocol.engine.messages import EngineFailure, Kind
from ollama_tiering.protocol.engine.wire import HEAD, frame

LONG_MS = 5000


class _Listening:
    """Serves each connection in a thread of its own. A context manager."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._listening = socket.socket(socket.AF_UNIX)
        self._listening.bind(str(path))
        self._listening.listen()

    def __enter__(self) -> Self:
        threading.Thread(target=self._accept, daemon=True).start()
        return self

    def __exit__(self, *_: object) -> None:
        with contextlib.suppress(OSError):
            self._listening.shutdown(socket.SHUT_RDWR)
        self._listening.close()

    def _accept(self) -> None:
        with contextlib.suppress(OSError):
            while True:
                engine, _ = self._listening.accept()
                threading.Thread(target=self._serve, args=(engine,), daemon=True).start()

    def _serve(self, engine: socket.socket) -> None:
        raise NotImplementedError


class SlowSidecar(_Listening):
    """Every answer of the real one comes `seconds` later. While it is `pending`, files are not at
    hand: a look-up is told so, and its WAIT is answered when they are.
    """

    def __init__(self, path: Path, real: Path) -> None:
        super().__init__(path)
        self._real = real
        self.seconds = 0.0
        self.pending = False
        self.waiting = threading.Event()  # an engine does

    def _serve(self, engine: socket.socket) -> None:
        with engine, socket.socket(socket.AF_UNIX) as sidecar:
            sidecar.connect(str(self._real))
            held: list[bytes] = []
            back = threading.Thread(target=self._answers, args=(sidecar, engine, held), daemon=True)
            back.start()
            self._requests(engine, sidecar, held)
            back.join()

    def _requests(self, engine: socket.socket, sidecar: socket.socket, held: list[bytes]) -> None:
        with contextlib.suppress(OSError):
            while got := _frame(engine):
                if got[0] != Kind.WAIT or not held:
                    sidecar.sendall(got[1])
                    continue
                self.waiting.set()
                while self.pending:
                    time.sleep(0.01)
                engine.sendall(held.pop())
        _end(engine, sidecar)

    def _answers(self, sidecar: socket.socket, engine: socket.socket, held: list[bytes]) -> None:
        with contextlib.suppress(OSError):
            while got := _frame(sidecar):
                time.sleep(self.seconds)
                kind, data = got
                if kind == Kind.MATCHED and self.pending:
                    held.append(data)
                    data = frame(Kind.MATCHED, m.Matched(0, 1, True, LONG_MS, 0, 0, ()).pack())
                engine.sendall(data)
        _end(engine, sidecar)


def _frame(source: socket.socket) -> tuple[int, bytes] | None:
    """Kind and bytes of the next one."""
    head = source.recv(HEAD.size, socket.MSG_WAITALL)
    if len(head) < HEAD.size:
        return None
    size, kind = struct.unpack_from("<IH", head)
    return kind, head + (source.recv(size, socket.MSG_WAITALL) if size else b"")


def _end(*ends: socket.socket) -> None:
    for end in ends:
        with contextlib.suppress(OSError):
            end.shutdown(socket.SHUT_RDWR)


class OtherVersion(_Listening):
    """A sidecar that knows no engine of this version."""

    def _serve(self, engine: socket.socket) -> None:
        with engine, contextlib.suppress(OSError):
            engine.recv(1 << 16)
            said = b"only version 1"
            code = struct.pack("<H", EngineFailure.VERSION)
            engine.sendall(frame(Kind.FAILED, code + struct.pack("<H", len(said)) + said))
