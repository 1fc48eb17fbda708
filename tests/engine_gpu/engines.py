"""Engines whose layers are on a GPU backend of GGML, driven alike: Ollama's own two, and
llama-server.

A character of a prompt is a token. `End` is how a process loses what it has in memory.
"""

from __future__ import annotations

import contextlib
import enum
import http.client
import json
import re
import shutil
import signal
import string
import subprocess
import time
import urllib.parse
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import pytest

from ollama_tiering.store.block.pb import block_store_pb2 as pb
from tests.engine.attention.fake_gpu import offloaded
from tests.engine.harness import Server, Sidecar, wait_until
from tests.engine_gpu.backends import Backend
from tests.engine_llama_server.server import LlamaServer, request
from tests.engine_llama_server.test_llama_server import report
from tests.engine_llama_server.test_states import settled

COUNT = 6  # tokens of an answer
SECONDS = 400.0  # for a start or an answer: a first one compiles pipelines on a busy machine
OF_ANSWERS = 0xE000  # characters that stand for what llama-server answered, a token each
CHARACTERS = string.ascii_letters + string.digits + " "
LATE = (pb.SHORTFALL_SIDECAR_LATE, pb.SHORTFALL_SIDECAR_AWAY)


class End(enum.Enum):
    UNLOAD = "unload"
    RESTART = "restart of everything"
    KILL = "kill -9"


@dataclass(frozen=True)
class Said:
    """An answer: `resumed` of the prompt's tokens were not computed for it."""

    resumed: int
    text: str
    bits: Any  # tokens, their logarithms, and those of the five most likely ones


class Engine(Protocol):
    """Whoever starts it ends it (`close`)."""

    def start(self) -> None: ...

    def ask(self, prompt: str, count: int = COUNT) -> Said: ...

    def leave(self, prompt: str, seconds: float) -> None:
        """A client that asks and leaves so long after its prompt has begun to be computed."""
        ...

    def settle(self) -> None:
        """Returns when all that it answered is stored."""
        ...

    def lose(self, end: End) -> None:
        """It starts anew, when all that it answered is stored; so does the sidecar with RESTART."""
        ...

    def restored(self) -> int:
        """Rows, for its last answer."""
        ...

    def late(self) -> bool:
        """Whether the sidecar's answer came too late for its last one: right, but no check."""
        ...

    def reason(self) -> str:
        """Why the model is not tiered; empty if it is."""
        ...

    def on_device(self) -> bool:
        """Whether rows are in the memory of the device, as its log says."""
        ...

    def log(self) -> str: ...

    def close(self) -> None: ...


class Ollama:
    """Ollama's own engines: which of them runs a model is said by its architecture."""

    def __init__(
        self,
        binary: Path,
        folder: Path,
        models: Path,
        model: str,
        sidecar: Sidecar | None,
        backend: Backend,
        env: Mapping[str, str],
        **options: Any,
    ) -> None:
        self._model, self._options, self._sidecar = model, options, sidecar
        self._said = f"library={backend.name}"
        given = {"OLLAMA_FLASH_ATTENTION": "1", **backend.env, **env}
        given["OLLAMA_LOAD_TIMEOUT"] = f"{SECONDS:.0f}s"
        socket = sidecar.socket if sidecar else None
        self.server = Server(binary, folder, models, socket=socket, env=given)
        self.server.http.timeout = SECONDS
        self._before = self._pauses = 0

    def start(self) -> None:
        self.server.start()

    def ask(self, prompt: str, count: int = COUNT) -> Said:
        self._before, self._pauses = len(self.server.restores()), self.server.pauses()
        answer = self.server.generate(self._model, prompt, predict=count, **self._options)
        return Said(answer.resumed, answer.text, answer.logprobs)

    def leave(self, prompt: str, seconds: float) -> None:
        body = self.server.body(self._model, prompt, predict=COUNT, **self._options)
        seen = len(self.server.loads())
        with contextlib.closing(post(self.server.url + "/api/generate", body)):
            wait_until("it is begun", lambda: len(self.server.loads()) > seen, SECONDS)
            time.sleep(seconds)

    def settle(self) -> None:
        if self._sidecar is not None:
            self._sidecar.settle(self.server, self._model)

    def lose(self, end: End) -> None:
        self.settle()
        if end is End.KILL:
            self.server.kill_runner(self._model)
        else:
            self.server.unload(self._model)
        if end is End.RESTART:
            self.server.stop()
            if self._sidecar is not None:
                self._sidecar.restart()
            self.server.start()

    def restored(self) -> int:
        return sum(one.tokens for one in self.server.restores()[self._before :])

    def late(self) -> bool:
        return self.server.pauses() > self._pauses

    def reason(self) -> str:
        assert self._sidecar is not None
        pid = self.server.runner_pid(self._model)
        stat = self._sidecar.wait(lambda s: any(r.pid == pid for r in s.runners), "it is reported")
        return next(one.reason for one in stat.runners if one.pid == pid)

    def on_device(self) -> bool:
        return offloaded(self.server)[0] > 0 and self._said in self.server.log_text()

    def log(self) -> str:
        return self.server.log_text()

    def close(self) -> None:
        self.server.__exit__()


class LlamaCpp:
    """llama-server of llama.cpp, as Ollama starts it from v0.30 on."""

    def __init__(
        self,
        program: Path,
        folder: Path,
        model: Path,
        sidecar: Sidecar | None,
        backend: Backend,
        env: Mapping[str, str],
        *options: str,
    ) -> None:
        self._sidecar, self._backend, self._asked = sidecar, backend, 0
        engine = None if sidecar is None else sidecar.socket.with_name("s.engine")
        folder.mkdir(parents=True, exist_ok=True)
        self.server = Patient(
            *(program, model, folder / "log"),
            *("-c", "1024", "--no-context-shift", "-lv", "4", *options),
            sidecar=engine,
            env={**backend.env, **env},
        )

    def start(self) -> None:
        self.server.start()

    def ask(self, prompt: str, count: int = COUNT) -> Said:
        said = self.server.complete(tokens(prompt), count)
        self._asked += 1
        text = "".join(chr(OF_ANSWERS + token) for token in said.tokens)
        return Said(said.cached, text, (said.tokens, said.bits))

    def leave(self, prompt: str, seconds: float) -> None:
        """Without its rows being wanted by anybody: or they would be copied aside first, which
        waits for the device by itself.
        """
        body = request(tokens(prompt), COUNT, cache_prompt=False)
        seen = self._begun()
        url = f"http://127.0.0.1:{self.server.port}/completion"
        with contextlib.closing(post(url, body)):
            wait_until("it is begun", lambda: self._begun() > seen, SECONDS)
            time.sleep(seconds)

    def _begun(self) -> int:
        """How many prompts. How far one is, a newer llama.cpp says only of what takes seconds."""
        return self.log().count("| new prompt, ")

    def settle(self) -> None:
        if self._sidecar is not None:
            settled(self._sidecar, self.server)

    def lose(self, end: End) -> None:
        process = self.server.process
        assert process is not None
        self.settle()
        if end is End.KILL:
            self.server.kill()
        else:
            process.send_signal(signal.SIGTERM)
            process.wait(SECONDS)
        if end is End.RESTART and self._sidecar is not None:
            self._sidecar.restart()
        self._asked = 0
        self.server.start()

    def restored(self) -> int:
        return self._last().restored_tokens

    def late(self) -> bool:
        return self._last().shortfall in LATE

    def _last(self) -> pb.LastRequest:
        assert self._sidecar is not None
        return report(self._sidecar, self.server, self._asked).last_request

    def reason(self) -> str:
        assert self._sidecar is not None
        process = self.server.process
        assert process is not None
        pid = process.pid
        stat = self._sidecar.wait(lambda s: any(r.pid == pid for r in s.runners), "it is reported")
        return next(one.reason for one in stat.runners if one.pid == pid)

    def on_device(self) -> bool:
        said = rf"{self._backend.name}\d (KV|RS) buffer size"
        return bool(re.search(said, self.server.log.read_text()))

    def log(self) -> str:
        return self.server.log.read_text(errors="replace")

    def close(self) -> None:
        if self.server.process is not None and self.server.process.poll() is None:
            self.server.kill()


def tokens(prompt: str) -> list[int]:
    """As llama-server gets them."""

    def token(character: str) -> int:
        number = ord(character) - OF_ANSWERS
        return number if number >= 0 else CHARACTERS.index(character) + 1

    return list(map(token, prompt))


def post(url: str, body: object) -> http.client.HTTPConnection:
    """A connection with a request on it, whose answer nobody has read."""
    parts = urllib.parse.urlsplit(url)
    assert parts.hostname is not None
    connection = http.client.HTTPConnection(parts.hostname, parts.port, timeout=SECONDS)
    json_type = {"Content-Type": "application/json"}
    connection.request("POST", parts.path, json.dumps(body), json_type)
    return connection


class Patient(LlamaServer):
    """A device that is a program takes its time."""

    start_seconds = request_seconds = SECONDS


def preloaded(folder: Path, code: str) -> Path:
    """A library for LD_PRELOAD, of this C."""
    compiler = shutil.which("gcc") or shutil.which("cc")
    if compiler is None:
        pytest.skip("no C compiler")
    source, library = folder / "preloaded.c", folder / "preloaded.so"
    source.write_text(code + "\n", encoding="utf-8")
    subprocess.run([compiler, "-shared", "-fPIC", source, "-o", library], check=True)
    return library
