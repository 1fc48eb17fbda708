"""The patched Ollama as a Driver.

Counts of tokens are what the runner reported to the sidecar; none is estimated.
"""

from __future__ import annotations

import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from ollama_tiering.engines.drivers import Answer, Scratch
from ollama_tiering.errors import ServiceError
from ollama_tiering.launch import ollama
from ollama_tiering.launch.address import Address, free_address
from ollama_tiering.launch.block_service import ask
from ollama_tiering.launch.process import Child
from ollama_tiering.sidecar.content.contents import BEING_READ
from ollama_tiering.store import block_store_pb2 as pb

MODEL = "tiering-demo"
_REPORT_SECONDS = 30.0
_CHECK_SECONDS = 600.0  # gigabytes of a model are read, with low priority
_UNLOAD_SECONDS = 10.0
_POLL_SECONDS = 0.01


class OllamaDriver:
    """Server and sidecar in a Scratch, with the Scratch's GGUF file as the model."""

    def __init__(
        self,
        binary: Path,
        scratch: Scratch,
        *,
        ctx: int = 4096,
        threads: int | None = None,
        env: Mapping[str, str | None] | None = None,
        tiered: bool = True,
        one_answer: bool = False,
    ) -> None:
        self.name = f"Ollama ({binary})"
        self.one_answer = one_answer
        self.last_report: pb.RunnerReport | None = None
        self._binary = binary
        self._scratch = scratch
        self._options: dict[str, Any] = {"num_ctx": ctx}
        self._options |= {"num_thread": threads} if threads else {}  # else Ollama's own number
        self._env = dict(env or {})
        self._sidecar = scratch.sidecar() if tiered else None
        self._asked = 0  # of this runner
        self._server: Child | None = None
        self._address = Address()
        self._log = scratch.root / f"ollama{'' if tiered else '-untiered'}.log"

    @property
    def api(self) -> ollama.Api:
        return ollama.Api(self._address)

    def start(self) -> None:
        self._start()
        if version := self.api.version():
            self.name = f"Ollama {version} ({self._binary})"
        self.api.create(MODEL, self._scratch.model_file, models=self._scratch.models)
        self._load()

    def _start(self) -> None:
        if self._sidecar:
            self._sidecar.ensure()
        self._address = free_address()
        socket = self._sidecar.socket if self._sidecar else None
        own = ollama.server_environment(self._address, socket, self._scratch.models)
        env = self._scratch.environment() | own
        self._server = ollama.start_server(
            self._binary, self._address, log=self._log, env=env | self._env, leashed=True
        )

    def ask(self, prompt: str, new_tokens: int) -> Answer:
        old = self.last_report or pb.RunnerReport()
        done = self.generate(prompt, new_tokens)
        report = self.settle()
        return Answer(
            tokens=tuple(done.tokens),
            logprobs=tuple(tuple(best) for best in done.logprobs),
            seconds_to_first_token=done.seconds_to_first_token,
            prompt_tokens=done.prompt_tokens,
            memory_tokens=report.memory_tokens - old.memory_tokens,
            restored_tokens=report.restored_tokens - old.restored_tokens,
            recomputed_tokens=report.recomputed_tokens - old.recomputed_tokens,
        )

    def generate(self, prompt: str, new_tokens: int) -> ollama.Generated:
        """The request alone, without what the sidecar knows of it."""
        self._asked += 1
        return self.api.generate(MODEL, prompt, num_predict=new_tokens, **self._options)

    def settle(self) -> pb.RunnerReport:
        """Waits for the runner's report, which comes when it has stored what it computed. Until the
        sidecar has checked the model's file nothing is stored.
        """
        begun = time.monotonic()
        deadline = begun + _REPORT_SECONDS
        while True:
            storing = False
            for report in self._runners():
                if report.reason == BEING_READ and time.monotonic() < begun + _CHECK_SECONDS:
                    deadline = time.monotonic() + _REPORT_SECONDS
                elif not report.tiered:
                    raise ServiceError(f"the runner does not tier this model: {report.reason}")
                elif report.requests >= self._asked:
                    storing = report.to_store > 0
                    if not storing:
                        self.last_report = report
                        return report
            if time.monotonic() > deadline:
                raise ServiceError(
                    f"the runner is still storing after {_REPORT_SECONDS:.0f} s"
                    if storing
                    else "the runner has reported nothing to the sidecar; is the binary a patched "
                    "one?",
                    hint=f"read {self._log}",
                )
            time.sleep(_POLL_SECONDS)

    def unload(self) -> None:
        runners = {report.pid for report in self._runners()}
        self.api.unload(MODEL)
        deadline = time.monotonic() + _UNLOAD_SECONDS
        while self.api.loaded() or runners & {report.pid for report in self._runners()}:
            if time.monotonic() > deadline:
                raise ServiceError("Ollama did not unload the model", hint=f"read {self._log}")
            time.sleep(_POLL_SECONDS)
        self._load()

    def restart(self) -> None:
        self.stop()
        self.resume()

    def close(self) -> None:
        self.stop()

    def stop(self) -> None:
        """Stops the server first, because it stores into the sidecar."""
        if self._server:
            self._server.stop(seconds=ollama.STOP_SECONDS)
            self._server = None
        if self._sidecar:
            self._sidecar.stop()

    def resume(self) -> None:
        self._start()
        self._load()

    def _load(self) -> None:
        """The runner is new, and counts from 0."""
        self.api.load(MODEL, **self._options)
        self._asked, self.last_report = 0, None

    def _runners(self) -> list[pb.RunnerReport]:
        answer = ask(self._sidecar.socket) if self._sidecar else None
        return list(answer.runners) if answer else []
