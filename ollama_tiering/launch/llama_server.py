"""A llama-server in a process of its own on loopback, as far as a self-test needs one."""

from __future__ import annotations

import base64
import contextlib
import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx

from ollama_tiering.errors import ServiceError
from ollama_tiering.launch.address import Address, free_address
from ollama_tiering.launch.process import Child, start, wait_ready

START_SECONDS = 120.0
REQUEST_SECONDS = 300.0
_ASK_SECONDS = 2.0


@dataclass(frozen=True, slots=True)
class Completed:
    """`bits`: of each token its number and logarithm, and those of the most likely ones."""

    cached_tokens: int
    tokens: tuple[int, ...]
    bits: tuple[Any, ...]


@dataclass(frozen=True, slots=True)
class PicturedPrompt:
    """An image stands between every two of the words."""

    words: tuple[str, ...]
    images: tuple[bytes, ...]


class LlamaServer:
    """Made by `serving`. `kill` ends it as a power cut would."""

    def __init__(self, child: Child, address: Address) -> None:
        self._child = child
        self._url = address.url

    def ready(self) -> bool:
        try:
            answer = httpx.get(f"{self._url}/health", timeout=_ASK_SECONDS, trust_env=False)
            return bool(answer.json()["status"] == "ok")
        except (httpx.HTTPError, ValueError, LookupError, TypeError):
            return False

    @property
    def pid(self) -> int:
        return self._child.pid

    def complete(
        self, prompt: Sequence[int] | PicturedPrompt, count: int, slot: int | None = None
    ) -> Completed:
        """The most likely tokens behind `prompt`. `slot`: the one to compute in. ServiceError where
        there is no such answer.
        """
        body = {
            "n_predict": count,
            "temperature": 0,
            "n_probs": 5,
            "cache_prompt": True,
            "return_tokens": True,
            "ignore_eos": True,
            **({} if slot is None else {"id_slot": slot}),
        }
        try:
            body["prompt"] = self._pictured(prompt)
            answer = httpx.post(
                f"{self._url}/completion", json=body, timeout=REQUEST_SECONDS, trust_env=False
            )
            said = answer.raise_for_status().json()
            bits = tuple(
                (one["id"], one["logprob"], *((t["id"], t["logprob"]) for t in one["top_logprobs"]))
                for one in said["completion_probabilities"]
            )
            return Completed(said["timings"]["cache_n"], tuple(said["tokens"]), bits)
        except (httpx.HTTPError, ValueError, LookupError, TypeError) as error:
            raise ServiceError(
                f"llama-server does not answer as it should: {error}",
                hint=f"read {self._child.log}",
                told=self._child.tail(),
            ) from None

    def _pictured(self, prompt: Sequence[int] | PicturedPrompt) -> Any:
        if not isinstance(prompt, PicturedPrompt):
            return list(prompt)
        told = httpx.get(f"{self._url}/props", timeout=_ASK_SECONDS, trust_env=False)
        marker: str = told.raise_for_status().json()["media_marker"]  # another one in each process
        encoded = [base64.b64encode(image).decode() for image in prompt.images]
        return {"prompt_string": marker.join(prompt.words), "multimodal_data": encoded}

    def kill(self) -> None:
        self._child.kill()

    def tail(self) -> str:
        """The last lines of its log."""
        return self._child.tail()


@contextlib.contextmanager
def serving(
    program: Path, model: Path, log: Path, env: Mapping[str, str | None], *options: str
) -> Iterator[LlamaServer]:
    """Ends it, however the body ends, and if we are killed. Variables of Ollama and llama.cpp are
    not inherited.
    """
    inherited = dict.fromkeys(
        (name for name in os.environ if name.startswith(("OLLAMA_", "LLAMA_"))), None
    )
    address = free_address()
    fixed = ("--host", address.host, "--port", str(address.port), "--no-webui", "--offline")
    command: list[str | Path] = [program, "--model", model, *fixed, *options]
    child = start("llama-server", *command, log=log, env={**inherited, **env}, leashed=True)
    try:
        server = LlamaServer(child, address)
        wait_ready(child, server.ready, seconds=START_SECONDS)
        yield server
    finally:
        child.kill()
