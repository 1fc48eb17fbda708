"""Real processes for the engine tests: the patched Ollama and the sidecar, in folders of their own.

`Server` and `Sidecar` are context managers; each starts one process in a session of its own and
ends it, by pid, when left. Everything is on loopback or a Unix socket. One printable character is
one token (`ollama_tiering.models.vocab`), so lengths of prompts are numbers of tokens.

Greedy answers are compared with what the same engine gives at the same resume position from memory,
bit for bit: a cold run differs from a hit in the last bits by stock's own nature.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import random
import re
import signal
import string
import subprocess
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar, NamedTuple

import httpx
import psutil

from ollama_tiering.store.block.pb import block_store_pb2 as pb
from tests.sidecar import SidecarProcess

BLOCK_TOKENS = 64
START_SECONDS = 60.0
ANSWER_SECONDS = 90.0
PREDICT = 16

# The server's environment is made, not inherited: nothing of the person who runs the tests gets in.
INHERITED = ("PATH", "LD_LIBRARY_PATH", "TMPDIR", "LANG")

_LOAD = re.compile(
    r'msg="loading cache slot" id=(\d+) cache=(\d+) prompt=(\d+) used=(\d+) remaining=(\d+)'
)
_RESTORE = re.compile(r'msg="kv restored" slot=(\d+) from=(\d+) tokens=(\d+)')
_LISTENS = re.compile(r"Listening on 127\.0\.0\.1:(\d+)")


class TokenLogprobs(NamedTuple):
    token: str
    logprob: float
    top: tuple[tuple[str, float], ...]


class SlotLoad(NamedTuple):
    """The runner's own line about a request: `used` of `prompt` tokens need not be computed."""

    slot: int
    cache: int
    prompt: int
    used: int
    remaining: int


class Restore(NamedTuple):
    slot: int
    first: int
    tokens: int


@dataclass(frozen=True)
class Result:
    """One answer. `resumed` is the position from which the prompt was computed."""

    text: str
    logprobs: tuple[TokenLogprobs, ...]
    prompt_tokens: int
    reason: str
    resumed: int
    seconds: float  # as the client saw it
    prompt_seconds: float  # as the runner says
    cached: int | None  # of the prompt's tokens, as the answer says; None where it does not

    @property
    def tokens(self) -> tuple[str, ...]:
        return tuple(step.token for step in self.logprobs)


def text(tokens: int, seed: object) -> str:
    """So many tokens, each printable; other seeds differ from the first few tokens on."""
    rng = random.Random(repr(seed))
    return "".join(rng.choices(string.ascii_letters + string.digits + "     ", k=tokens))


def wait_until(what: str, done: Callable[[], Any], timeout_seconds: float = 20.0) -> Any:
    deadline = time.monotonic() + timeout_seconds
    while not (found := done()):
        if time.monotonic() > deadline:
            raise TimeoutError(f"not within {timeout_seconds:g} s: {what}")
        time.sleep(0.01)
    return found


def assert_same(got: Result, reference: Result, what: object = "") -> None:
    """Bit for bit: tokens, their logprobs, the top logprobs, and where the prompt was resumed."""
    where = f"{what}: resumed at {got.resumed}, not {reference.resumed}"
    assert got.resumed == reference.resumed, where
    assert got.text == reference.text, f"{what}: {got.text!r} instead of {reference.text!r}"
    for step, (mine, theirs) in enumerate(zip(got.logprobs, reference.logprobs, strict=True)):
        assert mine == theirs, f"{what}: token {step} differs: {mine} instead of {theirs}"


def in_memory(server: Server, model: str, prompt: str, resumed: int, **options: Any) -> Result:
    """A server's own answer when memory holds just so many of the prompt's tokens; 0 is cold."""
    other = prompt[resumed:]
    if resumed < len(prompt) - 1:
        differs = "\n" if prompt[resumed] != "\n" else "\t"
        other = differs + text(len(prompt), "other")
    before = (prompt[:resumed] + other)[: len(prompt)]
    server.generate(model, before, **options | {"predict": 1})
    answer = server.generate(model, prompt, **options)
    assert answer.resumed == resumed
    return answer


class _Process:
    """A child in its own session, its output in a file."""

    def __init__(self, log: Path) -> None:
        self.log = log
        self._lines: list[str] = []
        self._read = 0
        self._child: subprocess.Popen[bytes] | None = None

    def _start(self, command: Sequence[str | Path], environment: Mapping[str, str]) -> None:
        with self.log.open("ab") as sink:
            self._child = subprocess.Popen(
                [str(part) for part in command],
                env=dict(environment),
                stdin=subprocess.DEVNULL,
                stdout=sink,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )

    @property
    def pid(self) -> int:
        assert self._child is not None, "not started"
        return self._child.pid

    @property
    def running(self) -> bool:
        return self._child is not None and self._child.poll() is None

    def signal(self, number: int) -> None:
        if self.running:
            os.kill(self.pid, number)

    def stop(self, timeout_seconds: float = 30.0) -> None:
        """SIGTERM to the process itself; SIGKILL only when it does not end."""
        self._end(signal.SIGTERM, timeout_seconds)

    def kill(self) -> None:
        self._end(signal.SIGKILL, 10)

    def _end(self, number: int, timeout_seconds: float) -> None:
        if self._child is None:
            return
        self.signal(number)
        try:
            self._child.wait(timeout_seconds)
        except subprocess.TimeoutExpired:
            self._child.kill()
            self._child.wait()
            raise
        finally:
            self._child = None

    def lines(self) -> list[str]:
        """The complete lines of the log so far; each is read once."""
        if self.log.exists():
            with self.log.open("rb") as file:
                file.seek(self._read)
                new, end, _ = file.read().rpartition(b"\n")
            self._read += len(new + end)
            self._lines += new.decode(errors="replace").splitlines()
        return self._lines

    def log_text(self) -> str:
        return "\n".join(self.lines())

    def log_tail(self, lines: int = 30) -> str:
        return "\n".join(line[:300] for line in self.lines()[-lines:])


class Server(_Process):
    """`ollama serve` with tiering on where `socket` is given, off where it is not."""

    def __init__(
        self,
        binary: Path,
        folder: Path,
        models: Path,
        *,
        socket: Path | None = None,
        env: Mapping[str, str | int] | None = None,
        threads: int = 1,
    ) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        super().__init__(folder / "server.log")
        self._loads: list[SlotLoad] = []
        self._restores: list[Restore] = []
        self._pauses = 0
        self._blobs: dict[str, str] = {}
        self.binary = binary
        self.threads = threads
        self.requests_of: dict[int, int] = {}  # by pid of the runner that served them
        home = folder / "home"
        home.mkdir(exist_ok=True)
        self.environment = {name: os.environ[name] for name in INHERITED if name in os.environ}
        self.environment |= {
            "HOME": str(home),
            "OLLAMA_HOST": "127.0.0.1:0",
            "OLLAMA_MODELS": str(models),
            "OLLAMA_NOPRUNE": "1",
            "OLLAMA_DEBUG": "1",
            "OLLAMA_NUM_PARALLEL": "1",
            "OLLAMA_KEEP_ALIVE": "30m",
            "NO_PROXY": "*",
        }
        if socket is not None:
            self.environment |= {
                "OLLAMA_KV_TIERING": "1",
                "OLLAMA_KV_TIER_SOCKET": str(socket),
                "OLLAMA_KV_TIER_GATE": "restore",
            }
        self.environment |= {name: str(value) for name, value in (env or {}).items()}
        self.http = httpx.Client(timeout=ANSWER_SECONDS, trust_env=False)
        self.url = ""

    def __enter__(self) -> Server:
        self.start()
        return self

    def __exit__(self, *_: object) -> None:
        try:
            self.stop()
        finally:
            self.http.close()

    def start(self) -> None:
        before = len(self.lines())
        self._start([self.binary, "serve"], self.environment)

        def port() -> str | None:
            if not self.running:
                raise AssertionError(f"server ended at its start\n{self.log_tail()}")
            found = map(_LISTENS.search, self.lines()[before:])
            return next((match[1] for match in found if match), None)

        self.url = "http://127.0.0.1:" + wait_until("the server listens", port, START_SECONDS)

    def restart(self) -> None:
        self.stop()
        self.start()

    # --- models ----------------------------------------------------------------------------------

    def create(self, name: str, gguf: Path, **parameters: Any) -> None:
        digest = "sha256:" + hashlib.sha256(gguf.read_bytes()).hexdigest()
        self.post(f"/api/blobs/{digest}", content=gguf.read_bytes())
        request = {"model": name, "files": {gguf.name: digest}, "stream": False, **parameters}
        self.post("/api/create", json=request)

    def unload(self, model: str) -> None:
        """keep_alive 0: returns when the runner has gone. Nothing where the model is not loaded."""
        pid = self.runner_pid(model)
        if pid is None:
            return
        self.post("/api/generate", json={"model": model, "keep_alive": 0, "stream": False})
        wait_until("the runner ends", lambda: pid not in self.runners())

    def blob(self, model: str) -> str:
        """File name of the model's weights."""
        if model not in self._blobs:
            shown = self.post("/api/show", json={"model": model})
            lines = shown["modelfile"].splitlines()
            path = next(line for line in lines if line.startswith("FROM "))
            self._blobs[model] = path.rpartition("/")[2]
        return self._blobs[model]

    # --- runners ---------------------------------------------------------------------------------

    def runners(self) -> dict[int, list[str]]:
        """pid -> command line of every runner that has a model."""
        found = {}
        with contextlib.suppress(psutil.Error):
            for child in psutil.Process(self.pid).children():
                with contextlib.suppress(psutil.Error):
                    command = child.cmdline()
                    if "runner" in command and "--model" in command:
                        found[child.pid] = command
        return found

    def runner_pid(self, model: str | None = None) -> int | None:
        blob = self.blob(model) if model else ""
        for pid, command in self.runners().items():
            if blob in command[command.index("--model") + 1]:
                return pid
        return None

    def kill_runner(self, model: str | None = None) -> None:
        pid = self.runner_pid(model)
        assert pid is not None, "no runner to kill"
        os.kill(pid, signal.SIGKILL)
        wait_until("the runner is gone", lambda: pid not in self.runners())

    # --- requests --------------------------------------------------------------------------------

    def post(self, path: str, **request: Any) -> dict[str, Any]:
        response = self.http.post(self.url + path, **request)
        if response.status_code >= 400:
            raise AssertionError(
                f"{path}: {response.status_code} {response.text}\n{self.log_tail()}"
            )
        return response.json() if response.content else {}

    def body(
        self,
        model: str,
        prompt: str,
        *,
        predict: int = PREDICT,
        num_ctx: int = 2048,
        keep_alive: str | int = "30m",
        logprobs: bool = True,
        images: Sequence[str] = (),
        **options: Any,
    ) -> dict[str, Any]:
        body: dict[str, Any] = {
            "model": model,
            "prompt": prompt,
            "raw": True,
            "stream": False,
            "keep_alive": keep_alive,
            "options": {
                "temperature": 0,
                "seed": 1,
                "num_predict": predict,
                "num_ctx": num_ctx,
                "num_thread": self.threads,
                **options,
            },
        }
        if logprobs:
            body |= {"logprobs": True, "top_logprobs": 5}
        if images:  # the prompt says where: [img-0], …
            body["images"] = list(images)
        return body

    def generate(self, model: str, prompt: str, **options: Any) -> Result:
        """One request while no other is in progress; `resumed` comes from the runner's log."""
        before = len(self.loads())
        start = time.monotonic()
        answer = self.post("/api/generate", json=self.body(model, prompt, **options))
        seconds = time.monotonic() - start
        load = wait_until("the runner's line", lambda: self.loads()[before:], 5.0)[-1]
        if pid := self.runner_pid(model):
            self.requests_of[pid] = self.requests_of.get(pid, 0) + 1
        return result_of(answer, load.used, seconds)

    # --- the runner's log ------------------------------------------------------------------------

    def lines(self) -> list[str]:
        known = len(self._lines)
        for line in super().lines()[known:]:
            if match := _LOAD.search(line):
                self._loads.append(SlotLoad(*map(int, match.groups())))
            elif match := _RESTORE.search(line):
                self._restores.append(Restore(*map(int, match.groups())))
            elif "kv tiering paused" in line:
                self._pauses += 1
        return self._lines

    def loads(self) -> list[SlotLoad]:
        self.lines()
        return self._loads

    def restores(self) -> list[Restore]:
        self.lines()
        return self._restores

    def pauses(self) -> int:
        """How often a call to the sidecar failed."""
        self.lines()
        return self._pauses


def result_of(answer: Mapping[str, Any], resumed: int, seconds: float) -> Result:
    return Result(
        text=answer["response"],
        logprobs=tuple(
            TokenLogprobs(
                step["token"],
                step["logprob"],
                tuple((top["token"], top["logprob"]) for top in step["top_logprobs"]),
            )
            for step in answer.get("logprobs", ())
        ),
        prompt_tokens=answer["prompt_eval_count"],
        reason=answer["done_reason"],
        resumed=resumed,
        seconds=seconds,
        prompt_seconds=answer.get("prompt_eval_duration", 0) / 1e9,
        cached=answer.get("prompt_eval_cached_count"),
    )


class Sidecar(SidecarProcess):
    """The product's own sidecar, as people have it: nothing of whoever runs the tests gets in.

    But for two settings: no test waits for a longer block, and none depends on how full this
    machine's disk is.
    """

    usual: ClassVar[Mapping[str, Any]] = {"tail_seconds": 0, "min_free_percent": 0}

    def __init__(
        self,
        folder: Path,
        fast: Path,
        *,
        ram_gb: float = 1.0,
        local_gb: float = 2.0,
        env: Mapping[str, str] | None = None,
        settings: Mapping[str, Any] | None = None,
    ) -> None:
        home = folder / "home"
        home.mkdir(parents=True, exist_ok=True)
        super().__init__(
            folder,
            fast=fast,
            ram_gb=ram_gb,
            local_gb=local_gb,
            env={"HOME": str(home), **(env or {})},
            settings=settings,
        )

    def heard(self, line: str) -> None:
        """Kept beside the server's log, for whoever looks into a failed test's folder."""
        super().heard(line)
        with (self.root / "sidecar.log").open("a", encoding="utf-8") as log:
            log.write(line)

    def inherited(self) -> dict[str, str]:
        return {name: os.environ[name] for name in INHERITED if name in os.environ}

    def report(self, pid: int | None) -> pb.RunnerReport:
        """What this runner last reported; an empty report when it has not."""
        return next((r for r in self.stat().runners if r.pid == pid), pb.RunnerReport())

    def settle(self, server: Server, model: str) -> pb.RunnerReport:
        """Waits until the runner has reported all its requests, and that all of them are stored.

        It also reports after each conversation that it has stored, while others wait.
        """
        pid = server.runner_pid(model)
        assert pid is not None, "no runner"
        sent = server.requests_of.get(pid, 0)
        seen: list[pb.RunnerReport] = []

        def reported() -> bool:
            seen.append(self.report(pid))
            return seen[-1].requests >= sent and not seen[-1].to_store

        wait_until(f"the runner reports {sent} requests, stored", reported)
        return seen[-1]

    def block_files(self, directory: Path | None = None) -> list[Path]:
        """Every block file of the tiers, or of one directory."""
        folders = [directory] if directory else [self.ram_dir, self.local_dir]
        return sorted(file for folder in folders for file in folder.glob("v1/*/*/*.kvb"))
