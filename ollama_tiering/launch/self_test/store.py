"""The store of a self-test: a sidecar of its own, asked what is stored of which llama-server."""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import Final

from ollama_tiering.config import GIB
from ollama_tiering.errors import ServiceError
from ollama_tiering.launch import block_service
from ollama_tiering.launch.block_service import BlockService
from ollama_tiering.launch.llama_server import LlamaServer
from ollama_tiering.store import block_store_pb2 as pb

NOT_KEPT: Final = "the tree is not kept; Ollama goes on as before"
_STORE_SECONDS: Final = 60.0
_LOOK_SECONDS: Final = 0.05
_QUIET_LOOKS: Final = 15  # without another block: nothing more comes
_BUDGET_BYTES: Final = 128 << 20  # of each tier
_SETTINGS: Final = "[sidecar]\ntail_seconds = 0\nmin_tokens = 1\nmin_free_percent = 0\n"


class NotTiered(Exception):
    """A llama-server refuses its model, and says why."""


class TrialStore:
    """A context manager. `folder` gets its files."""

    def __init__(self, folder: Path) -> None:
        folder.mkdir(exist_ok=True)
        settings = folder / "settings.toml"
        settings.write_text(_SETTINGS, encoding="utf-8")
        self._tiers = folder / "ram", folder / "local"
        self.socket = folder / "run" / "s"
        gib = str(_BUDGET_BYTES / GIB)
        places = ("--ram-dir", self._tiers[0], "--local", self._tiers[1])
        budgets = ("--ram-gb", gib, "--local-gb", gib)
        env: dict[str, str | None] = dict.fromkeys(
            (name for name in os.environ if name.startswith("OLLAMA_KV_")), None
        )
        env["XDG_STATE_HOME"] = str(folder / "state")  # what it counts is nothing a person asked
        options = ("--config", settings, *places, *budgets)
        log = folder / "sidecar.log"
        self._service = BlockService(self.socket, log, options, env, leashed=True)

    def __enter__(self) -> TrialStore:
        self._service.ensure()
        return self

    def __exit__(self, *_: object) -> None:
        self._service.stop()

    def wait(self, server: LlamaServer, blocks: int) -> None:
        """Waits until `count` of that server's are stored. NotTiered, ServiceError."""
        self._until(server, lambda stored: stored >= blocks)

    def settle(self, server: LlamaServer) -> None:
        """Waits until nothing more of that server's comes. NotTiered, ServiceError."""
        seen: list[int] = []

        def quiet(stored: int) -> bool:
            seen.append(stored)
            return len(seen) >= _QUIET_LOOKS and len(set(seen[-_QUIET_LOOKS:])) == 1 and stored > 0

        self._until(server, quiet)

    def files(self, server: LlamaServer) -> list[list[Path]]:
        """The blocks of that server's namespace, each by all its copies: when all are made."""
        deadline = time.monotonic() + _STORE_SECONDS
        while time.monotonic() < deadline:
            answer = block_service.ask(self.socket)
            if answer and not answer.queued_demotions:
                break
            time.sleep(_LOOK_SECONDS)
        namespace = self._runner(server)[0].namespace.hex()
        copies: dict[str, list[Path]] = {}
        for tier in self._tiers:
            for path in sorted(tier.glob(f"v1/{namespace}/*/*.kvb")):
                copies.setdefault(path.name, []).append(path)
        return [copies[name] for name in sorted(copies)]

    def _until(self, server: LlamaServer, enough: Callable[[int], bool]) -> None:
        deadline = time.monotonic() + _STORE_SECONDS
        while True:
            runner, blocks = self._runner(server)
            if runner.reason:
                raise NotTiered(runner.reason)
            if enough(blocks):
                return
            if time.monotonic() > deadline:
                said = "it knows the sidecar" if runner.pid else "it never spoke to the sidecar"
                raise ServiceError(
                    f"self-test: llama-server stored nothing within {_STORE_SECONDS:.0f} s, and "
                    f"{said}; last lines of its log:",
                    hint=NOT_KEPT,
                    told=server.tail(),
                )
            time.sleep(_LOOK_SECONDS)

    def _runner(self, server: LlamaServer) -> tuple[pb.RunnerReport, int]:
        """What that server's process said last, and how many blocks there are of its namespace."""
        answer = block_service.ask(self.socket)
        runners = answer.runners if answer else []
        runner = next((one for one in runners if one.pid == server.pid), pb.RunnerReport())
        namespaces = answer.namespaces if answer and runner.namespace else []
        return runner, sum(n.blocks for n in namespaces if n.namespace == runner.namespace)
