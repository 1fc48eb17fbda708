"""A peer with the model loaded, in a process of its own, asked over a Unix socket.

Seconds are counted here, from the request to the line with the token, as they are for Ollama: this
is what a client would see.
"""

from __future__ import annotations

import contextlib
import io
import json
import os
import re
import socket
import time
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, TextIO

from measure.peers import worker
from ollama_tiering.engines.drivers import Scratch
from ollama_tiering.errors import ServiceError
from ollama_tiering.launch.ollama import Generated
from ollama_tiering.launch.process import POLL_SECONDS, Child, died, start
from ollama_tiering.models.vocab import decode, encode
from ollama_tiering.store import block_store_pb2 as pb

_START_SECONDS = 60.0  # of the interpreter; loading the model may take longer
_STOP_SECONDS = 10.0
_ANSWER_SECONDS = 7200.0
_OTHERS = ("GGML_", "GOMP_", "LLAMA_", "IK_LLAMA_", "OMP_", "PYTHON")  # settings of a person's own
# From the widest on, as both libraries name what they were compiled for.
_INSTRUCTIONS = ("AVX512_VNNI", "AVX512", "AVX_VNNI", "AVX2", "AVX", "SVE", "NEON", "SSE3")


@dataclass(frozen=True, slots=True)
class Settings:
    """The settings that worker.py reads. The cache is f16, and nothing runs on a GPU."""

    peer: str
    context_tokens: int
    batch_tokens: int
    threads: int
    flash: bool


class PeerDriver:
    """Not thread-safe; `close` ends the process."""

    def __init__(self, python: Path, scratch: Scratch, settings: Settings) -> None:
        self.engine, self.built_for = "", ""  # known when it has started
        self._python, self._scratch, self._settings = python, scratch, settings
        self._child: Child | None = None
        self._lines: TextIO = io.StringIO()  # the connection, once there is one
        self._log = scratch.root / f"{settings.peer}.log"

    def start(self) -> None:
        """Returns when the model is loaded. ServiceError, with the last lines of its log, if it
        cannot be.
        """
        path = self._scratch.root / "p.sock"
        path.unlink(missing_ok=True)
        with socket.socket(socket.AF_UNIX) as listener:
            listener.bind(str(path))
            listener.listen(1)
            self._child = start(
                self._settings.peer,
                self._python,
                worker.__file__,
                str(path),
                json.dumps(self._worker_settings()),
                log=self._log,
                env=self._environment(),
                cwd=self._scratch.root,
                leashed=True,
            )
            with self._accept(listener, self._child) as connection:
                self._lines = connection.makefile("rw", encoding="utf-8")  # it stays open by this
        hello = self._receive()
        self.engine, self.built_for = str(hello["version"]), instructions(str(hello["system"]))

    def generate(self, prompt: str, new_tokens: int) -> Generated:
        """ServiceError if the process dies meanwhile."""
        answer = Generated()
        request = {"prompt": encode(prompt), "new_tokens": new_tokens}
        started = time.perf_counter()
        self._lines.write(json.dumps(request) + "\n")
        self._lines.flush()
        while "prompt_tokens" not in (message := self._receive()):
            seconds = time.perf_counter() - started
            best = [(decode([token]), float(logprob)) for token, logprob in message["top"]]
            answer.add(decode([message["token"]]), best, seconds)
        answer.prompt_tokens = int(message["prompt_tokens"])
        return answer

    def settle(self) -> pb.RunnerReport:
        """Nothing is stored."""
        return pb.RunnerReport()

    def close(self) -> None:
        if self._child:
            self._child.stop(seconds=_STOP_SECONDS)
            self._child = None
        with contextlib.suppress(OSError):  # of a request it has not read
            self._lines.close()

    def _worker_settings(self) -> dict[str, Any]:
        own_socket = self._scratch.root / "o.sock"
        own_socket.unlink(missing_ok=True)  # of one that was killed
        places = {"model": str(self._scratch.model_file), "own_socket": str(own_socket)}
        return asdict(self._settings) | places

    def _environment(self) -> Mapping[str, str | None]:
        own: dict[str, str | None] = {n: None for n in os.environ if n.startswith(_OTHERS)}
        return self._scratch.environment() | own

    def _accept(self, listener: socket.socket, child: Child) -> socket.socket:
        listener.settimeout(0.1)
        deadline = time.monotonic() + _START_SECONDS
        while True:
            try:
                connection, _ = listener.accept()
            except TimeoutError:
                if not child.running:
                    raise died(child) from None
                if time.monotonic() > deadline:
                    why = f"{child.name} did not start within {_START_SECONDS:.0f} s"
                    raise ServiceError(why, hint=f"read {child.log}") from None
            else:
                connection.settimeout(_ANSWER_SECONDS)
                return connection

    def _receive(self) -> dict[str, Any]:
        assert self._child
        try:
            line = self._lines.readline()
        except (ConnectionError, TimeoutError) as error:
            raise ServiceError(f"{self._child.name}: {error}", hint=f"read {self._log}") from error
        if not line:
            deadline = time.monotonic() + _STOP_SECONDS
            while self._child.running and time.monotonic() < deadline:
                time.sleep(POLL_SECONDS)  # it has closed the socket, and says soon how it ended
            raise died(self._child)
        message: dict[str, Any] = json.loads(line)
        return message


def instructions(system: str) -> str:
    """The widest instructions a library was compiled for, by what it prints of itself."""
    found = set(re.findall(r"(\w+) = 1\b", system))
    return next((name for name in _INSTRUCTIONS if name in found), "not told")
