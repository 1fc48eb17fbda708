"""A patched `ollama serve` in a process of its own, and the few calls of its HTTP API that we need.

It is stopped by SIGTERM to its own process id. It then asks its runners to store their K/V, and
ends them.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx

from ollama_tiering import config
from ollama_tiering.config.environment import ENV_ENGINE_SOCKET
from ollama_tiering.errors import ServiceError
from ollama_tiering.launch.address import Address
from ollama_tiering.launch.process import Child, start, wait_ready

START_SECONDS = 60.0
STOP_SECONDS = 30.0
_CONNECT_SECONDS = 5.0
_LOG = "Ollama's log says more: tiering logs"


def server_environment(
    address: Address,
    socket: Path | None,
    models: Path | None = None,
    cpu_attention: str | None = None,
) -> dict[str, str | None]:
    """The variables that are set in addition to the inherited ones. Without a socket tiering is
    off, so the server is stock. Without `cpu_attention` the inherited variable decides.
    """
    tiering: dict[str, str | None] = (
        {config.ENV_ENABLE: "1", config.ENV_SOCKET: str(socket)}
        if socket
        else {config.ENV_ENABLE: None, config.ENV_SOCKET: None}
    )
    place = {"OLLAMA_MODELS": str(models)} if models else {}
    attention = {config.ENV_CPU_ATTENTION: cpu_attention} if cpu_attention else {}
    return {"OLLAMA_HOST": str(address)} | place | attention | tiering


def llama_server_environment(
    address: Address,
    engine_socket: Path | None,
    models: Path | None = None,
    cpu_attention: str | None = None,
) -> dict[str, str | None]:
    """The same for an Ollama that runs llama-server. Its own cache of prompts is not turned off
    here: our library does that, for each model that the sidecar has welcomed.
    """
    place = {"OLLAMA_MODELS": str(models)} if models else {}
    attention = {config.ENV_CPU_ATTENTION: cpu_attention} if cpu_attention else {}
    tiering = {ENV_ENGINE_SOCKET: str(engine_socket) if engine_socket else None}
    return {"OLLAMA_HOST": str(address)} | place | attention | tiering


def start_server(
    binary: Path,
    address: Address,
    *,
    log: Path,
    env: Mapping[str, str | None],
    interrupted: Callable[[], bool] = lambda: False,
    leashed: bool = False,
) -> Child:
    """Starts `ollama serve` and waits until it answers. ServiceError with its last words if it does
    not.
    """
    child = start("ollama serve", binary, "serve", log=log, env=env, leashed=leashed)
    try:
        api = Api(address)
        wait_ready(
            child,
            lambda: api.version() is not None,
            seconds=START_SECONDS,
            interrupted=interrupted,
        )
    except BaseException:
        child.stop(seconds=STOP_SECONDS, hurry=interrupted)
        raise
    return child


@dataclass(slots=True)
class Generated:
    """One answer: its tokens as text, the most likely few at each step, and the time to the first
    and the last token.
    """

    tokens: list[str] = field(default_factory=list)
    logprobs: list[list[tuple[str, float]]] = field(default_factory=list)
    seconds_to_first_token: float = 0.0
    seconds_to_last_token: float = 0.0
    prompt_tokens: int = 0
    decode_tokens_per_second: float = 0.0  # as the server counts

    def add(self, token: str, best: list[tuple[str, float]], seconds: float) -> None:
        """Adds the next token, which came that many seconds after the request was sent."""
        if not self.tokens:
            self.seconds_to_first_token = seconds
        self.seconds_to_last_token = seconds
        self.tokens.append(token)
        self.logprobs.append(best)


class Api:
    """Calls to one server. Thread-safe: each call opens its own connection."""

    def __init__(self, address: Address, *, timeout: float = 7200.0) -> None:
        self._url = address.url
        self._timeout = timeout

    @contextlib.contextmanager
    def _client(self, timeout: float | None = None) -> Iterator[httpx.Client]:
        limits = httpx.Timeout(timeout or self._timeout, connect=_CONNECT_SECONDS)
        try:
            with httpx.Client(base_url=self._url, trust_env=False, timeout=limits) as client:
                yield client
        except httpx.ReadTimeout as error:
            if timeout is not None:
                raise  # the caller asked for a short one
            raise ServiceError(
                f"{self._url}: no answer within {self._timeout:.0f} s",
                hint="look at the server's log; the prompt may be too long for this machine",
            ) from error

    def version(self) -> str | None:
        """None if no Ollama answers."""
        try:
            with self._client(_CONNECT_SECONDS) as client:
                return str(client.get("/api/version").raise_for_status().json()["version"])
        except (httpx.HTTPError, ValueError, KeyError, TypeError):
            return None

    def create(self, name: str, gguf: Path, *, models: Path) -> None:
        """Registers a GGUF file under a name. `models` is the server's directory of models. It gets
        a link to the file if it can have one, so that the weights lie on the disk only once.
        """
        with gguf.open("rb") as file:
            digest = hashlib.file_digest(file, "sha256").hexdigest()
            blob = models / "blobs" / f"sha256-{digest}"
            blob.parent.mkdir(parents=True, exist_ok=True)
            with contextlib.suppress(OSError):  # on another file system; or it is there already
                blob.hardlink_to(gguf)
            file.seek(0)
            with self._client() as client:
                if client.head(f"/api/blobs/sha256:{digest}").is_error:
                    _checked(client.post(f"/api/blobs/sha256:{digest}", content=file))
                files = {"model": name, "files": {gguf.name: f"sha256:{digest}"}, "stream": False}
                _checked(client.post("/api/create", json=files))

    def load(self, model: str, **options: Any) -> None:
        """Loads the model. The options must be those of the requests to come."""
        self._post(model, "", options)

    def unload(self, model: str) -> None:
        """Returns when the server was told; the runner ends shortly after."""
        self._post(model, "", {}, keep_alive=0)

    def loaded(self) -> list[str]:
        with self._client() as client:
            content = _checked(client.get("/api/ps")).json()
        return [str(model["name"]) for model in content.get("models") or []]

    def generate(
        self, model: str, prompt: str, *, top_logprobs: int = 5, **options: Any
    ) -> Generated:
        """Streams the answer to a raw prompt; greedy unless the options say otherwise."""
        body = self._body(model, prompt, options) | {"stream": True, "logprobs": True}
        body["top_logprobs"] = top_logprobs
        answer = Generated()
        with self._client() as client:
            started = time.perf_counter()
            with client.stream("POST", "/api/generate", json=body) as response:
                if response.is_error:
                    response.read()
                _checked(response)
                for line in response.iter_lines():
                    _add(answer, json.loads(line), time.perf_counter() - started)
        return answer

    def compute(self, path: str, body: Mapping[str, Any]) -> dict[str, Any]:
        """The answer to a request that is not streamed."""
        with self._client() as client:
            return dict(_checked(client.post(path, json=body)).json())

    def _post(self, model: str, prompt: str, options: dict[str, Any], **more: Any) -> Any:
        body = self._body(model, prompt, options) | {"stream": False} | more
        return self.compute("/api/generate", body)

    @staticmethod
    def _body(model: str, prompt: str, options: dict[str, Any]) -> dict[str, Any]:
        # -1: no timer unloads the model between two measurements
        greedy = {"temperature": 0, "seed": 1} | options
        return {"model": model, "prompt": prompt, "raw": True, "options": greedy, "keep_alive": -1}


def _add(answer: Generated, part: dict[str, Any], seconds: float) -> None:
    if "error" in part:
        raise ServiceError(f"Ollama: {part['error']}", hint=_LOG)
    for entry in part.get("logprobs") or []:
        best = [(top["token"], float(top["logprob"])) for top in entry.get("top_logprobs") or []]
        answer.add(entry["token"], best, seconds)
    if part.get("done"):
        answer.prompt_tokens = int(part.get("prompt_eval_count") or 0)
        if nanoseconds := part.get("eval_duration"):
            answer.decode_tokens_per_second = part.get("eval_count", 0) * 1e9 / nanoseconds


def _checked(response: httpx.Response) -> httpx.Response:
    if response.is_error:
        try:
            reason = response.json()["error"]
        except (ValueError, KeyError, TypeError):
            reason = response.text or response.reason_phrase
        raise ServiceError(f"Ollama answered {response.status_code}: {reason}", hint=_LOG)
    return response
