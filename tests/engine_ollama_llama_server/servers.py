"""`ollama serve` and `tiering up` in processes of their own, and what is asked of them."""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self

import httpx
import psutil

from ollama_tiering.launch import block_service
from ollama_tiering.launch.address import free_address
from ollama_tiering.protocol.pb import administration_pb2 as adm

START_SECONDS = 120.0
WAIT_SECONDS = 60.0
REQUEST_SECONDS = 300.0
OPTIONS = {"temperature": 0, "seed": 1, "num_ctx": 2048, "num_thread": 1}


@dataclass(frozen=True)
class Place:
    """`root` is short and a test's own: settings, state, sockets and tiers."""

    root: Path
    cache: Path
    settings: str = ""  # more of them, as in the file

    @property
    def socket(self) -> Path:
        return self.root / "s"

    def environment(self) -> dict[str, str]:
        config = self.root / "config.toml"
        config.write_text(
            "[sidecar]\ntail_seconds = 0\nmin_tokens = 1\nmin_free_percent = 0\n"
            f'ram_dir = "{self.root}/ram"\nram_budget = "64MiB"\n'
            f'local_dir = "{self.root}/local"\nlocal_budget = "128MiB"\n{self.settings}'
        )
        names = ("OLLAMA_", "LLAMA_", "XDG_")
        return {k: v for k, v in os.environ.items() if not k.startswith(names)} | {
            "PYTHONPATH": os.pathsep.join(filter(None, sys.path)),
            "HOME": str(self.root),
            "XDG_STATE_HOME": str(self.root / "state"),
            "XDG_RUNTIME_DIR": str(self.root),
            "OLLAMA_TIERING_CACHE": str(self.cache),
            "OLLAMA_TIERING_CONFIG": str(config),
            "OLLAMA_KV_TIER_GATE": "restore",
            "OLLAMA_NO_CLOUD": "1",
            "OLLAMA_NOPRUNE": "1",
        }


def tiering(place: Place, *words: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "ollama_tiering", *words]
    return subprocess.run(
        command, env=place.environment(), capture_output=True, text=True, check=False
    )


def add_model(models: Path, name: str, gguf: Path) -> None:
    """As `ollama create` would, without its llama-quantize."""

    def blob(content: bytes) -> dict[str, Any]:
        digest = hashlib.sha256(content).hexdigest()
        path = models / "blobs" / f"sha256-{digest}"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(content)
        return {"digest": f"sha256:{digest}", "size": len(content)}

    weights = {"mediaType": "application/vnd.ollama.image.model", **blob(gguf.read_bytes())}
    text = {"mediaType": "application/vnd.ollama.image.template", **blob(b"{{ .Prompt }}")}
    config = {
        "model_format": "gguf",
        "model_family": name.partition("-")[0],
        "model_families": [name.partition("-")[0]],
        "model_type": "1M",
        "file_type": "F16",
        "architecture": "amd64",
        "os": "linux",
        "rootfs": {"type": "layers", "diff_ids": [weights["digest"], text["digest"]]},
    }
    kind = "application/vnd.docker.container.image.v1+json"
    document = {
        "schemaVersion": 2,
        "mediaType": "application/vnd.docker.distribution.manifest.v2+json",
        "config": {"mediaType": kind, **blob(json.dumps(config).encode())},
        "layers": [weights, text],
    }
    path = models / "manifests/registry.ollama.ai/library" / name / "latest"
    path.parent.mkdir(parents=True)
    path.write_text(json.dumps(document))


@dataclass(frozen=True)
class Said:
    """`bits`: of each token its text and logarithm, and those of the most likely ones."""

    text: str
    bits: tuple[Any, ...]


class Server:
    """One process in a session of its own; `kill` ends the whole session."""

    def __init__(self, place: Place, models: Path, env: Mapping[str, str]) -> None:
        self.place = place
        self.models = models
        self.env = env
        self.address = free_address()
        self.log = place.root / f"{type(self).__name__}-{self.address.port}.log"
        self.process: subprocess.Popen[bytes] | None = None

    def command(self) -> list[str]:
        raise NotImplementedError

    def start(self) -> Self:
        env = self.place.environment() | {
            "OLLAMA_HOST": str(self.address),
            "OLLAMA_MODELS": str(self.models),
        }
        with self.log.open("ab") as log:
            self.process = subprocess.Popen(
                self.command(),
                env={**env, **self.env},
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
        self.wait(self.is_answering, "it answers", START_SECONDS)
        return self

    def is_answering(self) -> bool:
        assert self.process is not None
        assert self.process.poll() is None, self.said()
        with contextlib.suppress(httpx.HTTPError):
            return httpx.get(f"{self.address.url}/api/version", trust_env=False).is_success
        return False

    def said(self) -> str:
        texts = [path.read_text(errors="replace")[-4000:] for path in self.logs()]
        return "\n".join(texts)

    def logs(self) -> list[Path]:
        return [self.log]

    def wait(self, true: Callable[[], bool], what: str, seconds: float = WAIT_SECONDS) -> None:
        end = time.monotonic() + seconds
        while not true():
            assert time.monotonic() < end, f"{what}\n{self.said()}"
            time.sleep(0.05)

    def kill(self) -> None:
        if self.process is not None:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self.process.pid, signal.SIGKILL)
            self.process.wait()

    def generate(self, model: str, prompt: str, tokens: int = 12, **options: int) -> Said:
        body = {
            "model": model,
            "prompt": prompt,
            "raw": True,
            "stream": False,
            "logprobs": True,
            "top_logprobs": 5,
            "options": {**OPTIONS, "num_predict": tokens, **options},
        }
        said = self._post(body)
        bits = tuple(
            (
                one["token"],
                one["logprob"],
                *((t["token"], t["logprob"]) for t in one["top_logprobs"]),
            )
            for one in said["logprobs"]
        )
        assert len(bits) > 1
        return Said(said["response"], bits)

    def unload(self, model: str) -> None:
        self._post({"model": model, "keep_alive": 0})
        self.wait(lambda: not self.runners(), "the model is unloaded")

    def runners(self) -> list[psutil.Process]:
        """The llama-servers that have a model."""
        assert self.process is not None
        found = []
        for process in psutil.Process(self.process.pid).children(recursive=True):
            with contextlib.suppress(psutil.Error):
                if "--model" in process.cmdline() and process.status() != psutil.STATUS_ZOMBIE:
                    found.append(process)
        return found

    def _post(self, body: Mapping[str, Any]) -> Any:
        url = f"{self.address.url}/api/generate"
        answer = httpx.post(url, json=body, timeout=REQUEST_SECONDS, trust_env=False)
        assert answer.is_success, f"{answer.text}\n{self.said()}"
        return answer.json()


class Stock(Server):
    def __init__(self, program: Path, place: Place, models: Path, env: Mapping[str, str]) -> None:
        super().__init__(place, models, {"LLAMA_ARG_CACHE_RAM": "0", **env})
        self.program = program

    def command(self) -> list[str]:
        return [str(self.program), "serve"]


class Up(Server):
    """Its attention is stock's unless `env` says another: answers are compared with stock's."""

    def __init__(self, ollama: Path, place: Place, models: Path, env: Mapping[str, str]) -> None:
        super().__init__(place, models, {"OLLAMA_CPU_ATTENTION": "stock", **env})
        self.ollama = ollama

    def command(self) -> list[str]:
        words = ("--ollama", str(self.ollama), "--socket", str(self.place.socket))
        return [sys.executable, "-m", "ollama_tiering", "up", *words]

    def logs(self) -> list[Path]:
        return [self.log, *sorted(self.place.root.glob("state/**/*.log"))]

    def kill(self) -> None:
        """Its children have sessions of their own, so it is asked to end them."""
        if self.process is not None and self.process.poll() is None:
            self.process.send_signal(signal.SIGTERM)
            try:
                self.process.wait(60)
            except subprocess.TimeoutExpired:
                super().kill()
                raise

    def daemon(self) -> psutil.Process:
        assert self.process is not None
        children = psutil.Process(self.process.pid).children(recursive=True)
        return next(one for one in children if one.cmdline()[1:] == ["serve"])

    def stat(self) -> adm.StatResponse:
        answer = block_service.ask(self.place.socket)
        assert answer is not None, self.said()
        return answer

    def wait_stored(self, blocks: int) -> None:
        def stored() -> bool:
            return sum(one.blocks for one in self.stat().namespaces) >= blocks

        self.wait(stored, f"{blocks} blocks are stored")

    def restored(self, pids: Sequence[int]) -> int:
        """Tokens that these runners have restored."""
        self.wait(
            lambda: {r.pid for r in self.stat().runners if r.requests} >= set(pids),
            "the request is reported",
        )
        return sum(r.restored_tokens for r in self.stat().runners if r.pid in pids)
