"""A llama-server in a process of its own, on loopback, with the tiering or without."""

from __future__ import annotations

import contextlib
import http.client
import json
import os
import socket
import subprocess
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any, Self

START_SECONDS = 60.0
REQUEST_SECONDS = 120.0
SOCKET = "OLLAMA_KV_TIER_ENGINE_SOCKET"
NEAR = 0.03  # of a logarithm: less than this changes where a prompt is cut otherwise
JSON = {"Content-Type": "application/json"}


@dataclass(frozen=True)
class Answer:
    """`bits`: of each token its number and logarithm, and those of the most likely ones."""

    cached: int
    computed: int
    tokens: tuple[int, ...]
    bits: tuple[Any, ...]
    drafted: int = 0  # tokens that were guessed, right or wrong


def alike(one: Answer, other: Answer) -> bool:
    """The same tokens, and logarithms as near as batches let them be: also of the most likely ones,
    of which those that are as likely as one another may change places.
    """
    return one.tokens == other.tokens and all(
        abs(mine - its) < NEAR
        for ours, theirs in zip(one.bits, other.bits, strict=True)
        for (_, mine), (_, its) in zip(ours[2], theirs[2], strict=True)
    )


def request(prompt: list[int] | list[list[int]], count: int, **options: Any) -> dict[str, Any]:
    return {
        "prompt": prompt,
        "n_predict": count,
        "temperature": 0,
        "n_probs": 5,
        "cache_prompt": True,
        "return_tokens": True,
        "ignore_eos": True,
        **options,
    }


def answer(said: Mapping[str, Any]) -> Answer:
    bits = tuple(
        (
            *(one["id"], one["logprob"]),
            tuple((top["id"], top["logprob"]) for top in one["top_logprobs"]),
        )
        for one in said.get("completion_probabilities", ())
    )
    timings = said["timings"]
    drafted = timings.get("draft_n", 0)
    return Answer(timings["cache_n"], timings["prompt_n"], tuple(said["tokens"]), bits, drafted)


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
    return port


class LlamaServer:
    """A context manager. It is ended by its own process id. Without a model it is a router."""

    start_seconds, request_seconds = START_SECONDS, REQUEST_SECONDS

    def __init__(
        self,
        binary: Path,
        model: Path | None,
        log: Path,
        *options: str,
        sidecar: Path | None = None,
        env: Mapping[str, str | None] | None = None,
    ) -> None:
        self.port = free_port()
        self.log = log
        fixed = ("--host", "127.0.0.1", "--port", str(self.port), "-t", "1", "--no-webui")
        named = () if model is None else ("--model", str(model))
        self._command = [str(binary), *named, *fixed, "--offline", *options]
        self._env = {k: v for k, v in os.environ.items() if not k.startswith(("OLLAMA_", "LLAMA_"))}
        given = {"LLAMA_ARG_CACHE_RAM": "0", **(env or {})}  # None: without it
        self._env |= {name: value for name, value in given.items() if value is not None}
        if sidecar is not None:
            self._env[SOCKET] = str(sidecar)
        self.process: subprocess.Popen[bytes] | None = None

    def start(self) -> Self:
        with self.log.open("ab") as output:
            process = self.process = subprocess.Popen(
                self._command,
                env=self._env,
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
            )
        self.wait_ready(process)
        return self

    def wait_ready(self, process: subprocess.Popen[bytes]) -> None:
        end = time.monotonic() + self.start_seconds
        while True:
            with contextlib.suppress(OSError):
                if self._get("/health").get("status") == "ok":
                    return
            said = self.log.read_text(errors="replace")[-3000:]
            assert process.poll() is None, said
            assert time.monotonic() < end, said
            time.sleep(0.05)

    def wait_for(self, true: Callable[[], bool], seconds: float = REQUEST_SECONDS) -> None:
        end = time.monotonic() + seconds
        while not true():
            assert time.monotonic() < end, self.log.read_text(errors="replace")[-3000:]
            time.sleep(0.02)

    def kill(self) -> None:
        assert self.process is not None
        self.process.kill()
        self.process.wait()

    def __enter__(self) -> Self:
        return self.start()

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.kill()

    def complete(self, tokens: Sequence[int], count: int = 12, **options: Any) -> Answer:
        return self.complete_all(list(tokens), count, **options)[0]

    def complete_all(
        self, prompt: list[int] | list[list[int]], count: int = 12, **options: Any
    ) -> list[Answer]:
        """One prompt or several, and of each as many answers as `n_cmpl` says."""
        said = self._post("/completion", request(prompt, count, **options))
        return [answer(one) for one in (said if isinstance(said, list) else [said])]

    def stream(self, tokens: Sequence[int], count: int, **options: Any) -> Iterator[float]:
        """When each token came."""
        body = request(list(tokens), count, n_probs=0, stream=True, **options)
        connection = http.client.HTTPConnection(
            "127.0.0.1", self.port, timeout=self.request_seconds
        )
        with contextlib.closing(connection):
            connection.request("POST", "/completion", json.dumps(body), JSON)
            for line in connection.getresponse():
                if line.startswith(b"data: ") and b'"stop":false' in line:
                    yield time.monotonic()

    def ask_and_leave(self, tokens: Sequence[int], until: threading.Event) -> None:
        """A client that does not wait for its answer."""
        body = request(list(tokens), 12, stream=True)
        connection = http.client.HTTPConnection(
            "127.0.0.1", self.port, timeout=self.request_seconds
        )
        with contextlib.closing(connection):
            connection.request("POST", "/completion", json.dumps(body), JSON)
            assert until.wait(self.request_seconds)

    def media_marker(self) -> str:
        """What stands for an image in a prompt: another text in each process."""
        return str(self._get("/props")["media_marker"])

    def post_completion(self, body: object) -> Any:
        return self._post("/completion", body)

    def slot_file(self, action: str, name: str) -> None:
        """`save` or `restore` of the first slot: stock's own files."""
        self._post(f"/slots/0?action={action}", {"filename": name})

    def scale_adapter(self, scale: float) -> None:
        """The first one, for all requests that come."""
        self._post("/lora-adapters", [{"id": 0, "scale": scale}])

    def _get(self, path: str) -> Any:
        return self._ask(urllib.request.Request(self._url(path)), 2.0)

    def _post(self, path: str, body: object) -> Any:
        data = json.dumps(body).encode()
        return self._ask(urllib.request.Request(self._url(path), data, JSON), self.request_seconds)

    def _ask(self, request: urllib.request.Request, seconds: float) -> Any:
        try:
            with urllib.request.urlopen(request, timeout=seconds) as answer:
                return json.load(answer)
        except urllib.error.HTTPError as error:
            with error:
                if error.code != 503:  # it is loading the model
                    raise AssertionError(error.read().decode()) from None
            raise OSError("not ready") from None

    def _url(self, path: str) -> str:
        return f"http://127.0.0.1:{self.port}{path}"


Starter = Callable[..., LlamaServer]  # the fixture `start`
