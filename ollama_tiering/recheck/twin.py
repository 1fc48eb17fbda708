"""A second llama-server like one that runs: the same program, options and variables, so that it
computes the same bits. It never restores, and what it computes is compared by the sidecar.
"""

from __future__ import annotations

import contextlib
import json
import os
import secrets
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import psutil

from ollama_tiering.config import memory_limit
from ollama_tiering.config.environment import ENV_ENGINE_SOCKET
from ollama_tiering.errors import ServiceError
from ollama_tiering.launch import leash
from ollama_tiering.launch.address import Address, free_address

GATE: Final = "OLLAMA_KV_TIER_GATE"
_NEVER_RESTORE: Final = "recompute"
# Who listens where, who may ask, and what is written is the other's own.
_OWN_OPTIONS: Final = frozenset(
    (
        *("--host", "--port", "--api-key", "--api-key-file", "--ssl-key-file", "--ssl-cert-file"),
        *("--slot-save-path", "--log-file", "--media-path", "--api-prefix"),
    )
)
_OWN_VARIABLES: Final = (
    *("LLAMA_ARG_HOST", "LLAMA_ARG_PORT", "LLAMA_API_KEY", "LLAMA_ARG_SSL", "LLAMA_ARG_API_PREFIX"),
    *("LLAMA_SERVER_ROUTER_PORT", "LLAMA_SERVER_CHILD_MODE"),  # of one that a router has started
)
_KEY: Final = "LLAMA_API_KEY"
_NAME: Final = "llama-server"
START_SECONDS: Final = 600.0  # a large model, at the lowest priority
ANSWER_SECONDS: Final = 3600.0
_END_SECONDS: Final = 60.0  # to store what it has computed
_ASK_SECONDS: Final = 0.25
_OPENER: Final = urllib.request.build_opener(urllib.request.ProxyHandler({}))


@dataclass(frozen=True, slots=True)
class Twin:
    program: Path
    arguments: tuple[str, ...]
    env: dict[str, str]
    folder: Path
    private_bytes: int  # that the other has for itself: the model's file is shared


def twin_of(pid: int) -> Twin:
    """ServiceError if that process cannot be looked at, or is no llama-server of a sidecar."""
    try:
        process = psutil.Process(pid)
        command, env = process.cmdline(), process.environ()
        program, folder = Path(process.exe()), Path(process.cwd())
        private_bytes = int(process.memory_full_info().uss)
    except (psutil.Error, OSError) as error:
        raise ServiceError(
            f"process {pid} cannot be looked at: {error}",
            hint="run it as the user whose Ollama it is, or as root",
        ) from None
    if not _is_the_same(program, Path(f"/proc/{pid}/exe")):
        raise ServiceError(
            f"{program} was replaced since process {pid} was started",
            hint="let the model be loaded anew",
        )
    if not program.name.startswith(_NAME) or ENV_ENGINE_SOCKET not in env:
        raise ServiceError(
            f"process {pid} is no {_NAME} that a sidecar serves, but {program}",
            hint="run it where the sidecar runs, not beside its container",
        )
    env = {k: v for k, v in env.items() if not k.startswith(_OWN_VARIABLES)}
    return Twin(
        *(program, without_own(command[1:]), {**env, GATE: _NEVER_RESTORE}),
        *(folder, private_bytes),
    )


def _is_the_same(one: Path, other: Path) -> bool:
    try:
        return one.samefile(other)
    except OSError:
        return False


def without_own(arguments: Sequence[str]) -> tuple[str, ...]:
    """The options that decide what is computed, and all others but _OWN_OPTIONS."""
    kept: list[str] = []
    words = iter(arguments)
    for word in words:
        if word.partition("=")[0] not in _OWN_OPTIONS:
            kept.append(word)
        elif "=" not in word:
            next(words, None)
    return tuple(kept)


def give_way() -> None:
    """This process, and all that it starts, computes only where nobody else wants to."""
    with contextlib.suppress(OSError):
        os.setpriority(os.PRIO_PROCESS, 0, 19)
    with contextlib.suppress(OSError):
        os.sched_setscheduler(0, os.SCHED_IDLE, os.sched_param(0))


class RunningTwin:
    """Made by `running`. `key`: whoever asks has to know it."""

    def __init__(
        self, process: subprocess.Popen[bytes], address: Address, key: str, log: Path
    ) -> None:
        self.process = process
        self._address = address
        self._key = key
        self._log = log

    def wait_ready(self, seconds: float = START_SECONDS) -> None:
        """ServiceError if it does not serve in time."""
        end = time.monotonic() + seconds
        while True:
            if self._listens():
                with contextlib.suppress(OSError, ValueError), self._open("/health", 5.0) as answer:
                    if json.load(answer).get("status") == "ok":
                        return
            if self.process.poll() is not None or time.monotonic() > end:
                raise ServiceError(
                    "the second llama-server does not start", hint=f"what it said: {self._log}"
                )
            time.sleep(_ASK_SECONDS)

    def _listens(self) -> bool:
        """Whether the port is its own: another program may have taken it meanwhile."""
        with contextlib.suppress(psutil.Error):
            found = psutil.Process(self.process.pid).net_connections(kind="tcp")
            return any(
                one.status == psutil.CONN_LISTEN and one.laddr.port == self._address.port
                for one in found
            )
        return False

    def most_tokens(self) -> int:
        """Of a prompt, with room for an answer; 0 if it does not say."""
        try:
            with self._open("/props", 5.0) as answer:
                said = json.load(answer)["default_generation_settings"]["n_ctx"]
            return max(0, int(said) - 2)
        except (OSError, ValueError, KeyError, TypeError):
            return 0

    def compute(self, tokens: Sequence[int], seconds: float = ANSWER_SECONDS) -> None:
        """ServiceError."""
        body = {"prompt": list(tokens), "n_predict": 1, "temperature": 0, "cache_prompt": True}
        try:
            with self._open("/completion", seconds, json.dumps(body).encode()) as answer:
                said: Any = json.load(answer)
        except (OSError, ValueError) as error:
            raise ServiceError(
                f"the second llama-server does not answer: {error}",
                hint=f"what it said: {self._log}",
            ) from None
        if not isinstance(said, dict):
            raise ServiceError(
                "the second llama-server answers something else", hint=f"its log: {self._log}"
            )

    def _open(self, path: str, seconds: float, body: bytes | None = None) -> Any:
        """A proxy of the environment is not asked. OSError."""
        headers = {"Content-Type": "application/json", "Authorization": f"Bearer {self._key}"}
        request = urllib.request.Request(self._address.url + path, body, headers)
        return _OPENER.open(request, timeout=seconds)


def _available_bytes() -> int:
    """Of the machine and of the memory group that this process, and so the second server, is in."""
    available_bytes = int(psutil.virtual_memory().available)
    limit = memory_limit()
    for name in ("memory.current", "memory.usage_in_bytes"):
        if limit.group is not None:
            with contextlib.suppress(OSError, ValueError):
                used_bytes = int(limit.group.with_name(name).read_text())
                available_bytes = min(available_bytes, limit.limit_bytes - used_bytes)
    return max(0, available_bytes)


@contextlib.contextmanager
def running(twin: Twin, log: Path) -> Iterator[RunningTwin]:
    """It ends with the block, after it has offered what it computed. ServiceError."""
    available_bytes = _available_bytes()
    if 2 * twin.private_bytes > available_bytes:
        raise ServiceError(
            f"a second llama-server takes {twin.private_bytes >> 20} MiB, and only "
            f"{available_bytes >> 20} MiB are available",
            hint="twice as much must be: try again when less is loaded, or with a smaller context",
        )
    address, key = free_address(), secrets.token_hex(16)
    where = ("--host", address.host, "--port", str(address.port))
    log.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    with log.open("wb") as output:
        process = subprocess.Popen(
            [sys.executable, "-IS", leash.__file__, str(twin.program), *twin.arguments, *where],
            env={**twin.env, _KEY: key},
            cwd=twin.folder,
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
        )
    try:
        yield RunningTwin(process, address, key, log)
        process.terminate()
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(_END_SECONDS)
    finally:
        if process.poll() is None:
            process.kill()
        process.wait()
