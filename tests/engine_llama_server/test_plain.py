"""`tiering llama-server` with the real one: what it knew outlives it and its sidecar."""

from __future__ import annotations

import random
import time
from collections.abc import Callable
from pathlib import Path

from ollama_tiering.launch import block_service
from tests.engine_llama_server.server import LlamaServer
from tests.engine_llama_server.test_llama_server import blocks_of, text
from tests.llama_command import LlamaCommand
from tests.places import short_directory


class Plain(LlamaServer):
    """Started by the command, and asked as any other."""

    def __init__(self, command: LlamaCommand, program: Path, model: Path) -> None:
        super().__init__(program, model, command.log, "-np", "1", "-c", "2048")
        name, *arguments = self._command
        self._started = lambda: command.start("--program", name, "--", *arguments)

    def start(self) -> Plain:
        self.process = self._started()
        self.wait_ready(self.process)
        return self

    def end(self) -> None:
        assert self.process is not None
        self.process.terminate()
        assert self.process.wait(60) == 0


def test_what_it_knew_comes_back_after_a_restart_of_both(
    patched: Path, model: Callable[[str], Path]
) -> None:
    prompt = text(random.Random(3), 300)
    settings = {"OLLAMA_KV_TIER_MIN_TOKENS": "1", "OLLAMA_KV_TIER_GATE": "restore"}
    with short_directory() as root, LlamaCommand(root, **settings) as command:
        server = Plain(command, patched, model("llama-tiny")).start()
        assert server.complete(prompt).cached == 0
        end = time.monotonic() + 30
        while True:
            stat = block_service.ask(command.socket)
            assert stat is not None
            if sum(one.blocks for one in stat.namespaces) >= blocks_of(300):
                break
            assert time.monotonic() < end, command.said()[-3000:]
            time.sleep(0.1)
        server.end()
        assert block_service.ask(command.socket) is None
        again = Plain(command, patched, model("llama-tiny")).start()
        assert again.complete([*prompt, 7]).cached == 300
        again.end()
