"""The numpy reference engine as a Driver, for a machine on which Ollama cannot be built.

The sidecar is the real one.
"""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import IO, Any

from ollama_tiering.engines.drivers import Answer, Scratch
from ollama_tiering.errors import ServiceError
from ollama_tiering.launch.process import environment, log_tail, package_path

_STOP_SECONDS = 10.0


class ReferenceDriver:
    """Engine and sidecar in a Scratch, with the Scratch's GGUF file as the model."""

    name = "reference engine (numpy)"
    one_answer = False

    def __init__(self, scratch: Scratch, *, ctx: int = 4096) -> None:
        self._scratch = scratch
        self._ctx = ctx
        self._sidecar = scratch.sidecar()
        self._log = scratch.root / "reference.log"
        self._worker: subprocess.Popen[str] | None = None

    def start(self) -> None:
        self._sidecar.ensure()
        command = [sys.executable, "-m", "ollama_tiering.engines.reference_worker"]
        command += [str(self._scratch.model_file), str(self._sidecar.socket), str(self._ctx)]
        env = environment(self._scratch.environment() | package_path())
        with self._log.open("ab") as log:
            self._worker = subprocess.Popen(
                command,
                env=env,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=log,
                text=True,
                start_new_session=True,
            )
        self._read(self._worker)

    def ask(self, prompt: str, new_tokens: int) -> Answer:
        found = self._call({"prompt": prompt, "new_tokens": new_tokens})
        logprobs = tuple(tuple((t, p) for t, p in step) for step in found.pop("logprobs"))
        return Answer(tokens=tuple(found.pop("tokens")), logprobs=logprobs, **found)

    def unload(self) -> None:
        self._call({"forget": True})

    def restart(self) -> None:
        self.close()
        self.start()

    def close(self) -> None:
        if worker := self._worker:
            self._worker = None
            assert worker.stdin
            assert worker.stdout
            worker.stdin.close()  # end of input ends it
            try:
                worker.wait(_STOP_SECONDS)
            except subprocess.TimeoutExpired:
                worker.kill()
                worker.wait()
            worker.stdout.close()
        self._sidecar.stop()

    def _call(self, request: dict[str, Any]) -> dict[str, Any]:
        worker = self._worker
        assert worker
        stdin: IO[str] | None = worker.stdin
        assert stdin
        try:
            stdin.write(json.dumps(request) + "\n")
            stdin.flush()
        except BrokenPipeError:
            raise self._died(worker) from None
        return self._read(worker)

    def _read(self, worker: subprocess.Popen[str]) -> dict[str, Any]:
        assert worker.stdout
        line = worker.stdout.readline()
        if not line:
            raise self._died(worker)
        content: dict[str, Any] = json.loads(line)
        return content

    def _died(self, worker: subprocess.Popen[str]) -> ServiceError:
        code = worker.wait()
        return ServiceError(
            f"the reference engine ended with exit code {code}:", told=log_tail(Path(self._log))
        )
