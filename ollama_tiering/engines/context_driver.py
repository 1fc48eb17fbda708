"""The patched Ollama without tiering, for one model at several contexts: its plans, as its log has
them, and its answers.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path

from ollama_tiering.engines.context_demo import ContextServer, Env, Serve
from ollama_tiering.engines.drivers import Scratch
from ollama_tiering.engines.ollama_driver import MODEL, OllamaDriver
from ollama_tiering.errors import MissingTool, ServiceError
from ollama_tiering.launch import server_log
from ollama_tiering.launch.ollama import Generated
from ollama_tiering.launch.server_log import LoadPlan, LoggedGpu
from ollama_tiering.patchset import gpu_libraries

_FOUND_SECONDS = 60.0  # the search for GPUs starts a process for each library
_UNLOAD_SECONDS = 30.0
_POLL_SECONDS = 0.02
_WARM = "warm"  # a first prompt, so that no run pays for what is made once


class ContextDriver(OllamaDriver):
    """A ContextServer. Whoever starts it closes it."""

    def __init__(self, binary: Path, scratch: Scratch, env: Env) -> None:
        super().__init__(binary, scratch, env=env, tiered=False)
        self._begun = 0  # bytes that servers before this one have written to the log

    def start(self) -> None:
        self._begun = self._log.stat().st_size if self._log.exists() else 0
        self._start()

    def make(self) -> None:
        """Registers the model."""
        self.api.create(MODEL, self._scratch.model_file, models=self._scratch.models)

    def log_text(self) -> str:
        """What this server has said so far."""
        with self._log.open("rb") as log:
            log.seek(self._begun)
            return log.read().decode(errors="replace")

    def gpus(self) -> list[LoggedGpu]:
        if not _wait(lambda: server_log.gpus(self.log_text()) is not None, _FOUND_SECONDS):
            raise ServiceError("Ollama does not say which GPUs it found", hint=f"read {self._log}")
        return server_log.gpus(self.log_text()) or []

    def run(self, num_ctx: int, prompt: str, new_tokens: int) -> tuple[LoadPlan, Generated]:
        self._options["num_ctx"] = num_ctx
        self._load()
        self.generate(_WARM, 2)
        answer = self.generate(prompt, new_tokens)
        plan = server_log.load_plan(self.log_text())
        if plan is None:
            raise ServiceError(
                "Ollama does not say which layers are on the GPU", hint=f"read {self._log}"
            )
        self.api.unload(MODEL)
        if not _wait(lambda: not self.api.loaded(), _UNLOAD_SECONDS):
            raise ServiceError("Ollama did not unload the model", hint=f"read {self._log}")
        return plan, answer


def server_of(binary: Path, scratch: Scratch) -> Serve:
    """How context_demo.show starts a server of this program with the Scratch's model."""

    @contextlib.contextmanager
    def serve(env: Env) -> Iterator[ContextServer]:
        driver = ContextDriver(binary, scratch, env)
        with contextlib.closing(driver):
            driver.start()
            driver.make()
            yield driver

    return serve


def paging_binary(named: Path | None, built: Iterable[Path]) -> Path:
    """The named program, else the newest of those that were built with what pages K/V. MissingTool
    where there is none.
    """
    candidates = [named] if named else list(built)
    for binary in candidates:
        folders = gpu_libraries.loaded_by(binary, paged=True)
        if any(one.library == gpu_libraries.SHIM for one in folders):
            return binary
    where = f"beside {candidates[0]}" if candidates else "because no patched Ollama was built"
    raise MissingTool(
        f"there is no {gpu_libraries.SHIM} {where}, and --context needs it and an NVIDIA GPU",
        hint="`tiering patch --gpu stock` builds an Ollama that has it",
    )


def _wait(done: Callable[[], bool], seconds: float) -> bool:
    """Whether it was done in time."""
    deadline = time.monotonic() + seconds
    while not done():
        if time.monotonic() > deadline:
            return False
        time.sleep(_POLL_SECONDS)
    return True
