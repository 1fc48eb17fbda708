"""`tiering llama-server` without a model: a router, which starts a llama-server for each model."""

from __future__ import annotations

import contextlib
import http.client
import json
import re
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Self

import psutil

from ollama_tiering.launch import block_service
from ollama_tiering.protocol.pb import administration_pb2 as adm
from ollama_tiering.store.block.pb import block_store_pb2 as pb
from tests.engine_llama_server.server import JSON, LlamaServer, request
from tests.llama_command import LlamaCommand

QUIET = 32  # looks, 20 ms apart
_OF_MODEL = re.compile(r"\[ *\d+\] ")  # the router puts its port before what a model says


class Router(LlamaServer):
    """Started by the command, asked for each of its models by name. `process` is the command's."""

    def __init__(self, command: LlamaCommand, program: Path, *options: str) -> None:
        super().__init__(program, None, command.log, *options)
        self._command_of_ours = command

    def start(self) -> Self:
        name, *arguments = self._command
        self.process = self._command_of_ours.start("--program", name, "--", *arguments)
        self.wait_ready(self.process)
        return self

    def end(self) -> int:
        """As Ctrl-C does it; the exit code."""
        assert self.process is not None
        self.process.terminate()
        return self.process.wait(60)

    @property
    def router(self) -> psutil.Process:
        """The llama-server that the command has started."""
        assert self.process is not None
        (found,) = [
            one
            for one in psutil.Process(self.process.pid).children()
            if one.cmdline()[0] == self._command[0]
        ]
        return found

    def models(self) -> dict[str, psutil.Process]:
        """The llama-server of each model that is loaded."""
        found = {}
        for one in self.router.children():
            words = one.cmdline()
            if "--alias" in words:
                found[words[words.index("--alias") + 1]] = one
        return found

    def state(self, name: str) -> str:
        """Of a model, as the router says it."""
        (value,) = [
            one["status"]["value"] for one in self._get("/models")["data"] if one["id"] == name
        ]
        return str(value)

    def wait_state(self, name: str, state: str) -> None:
        self.wait_for(lambda: self.state(name) == state, 30)

    def unload(self, name: str) -> None:
        self._post("/models/unload", {"model": name})
        self.wait_state(name, "unloaded")

    def kill_model(self, name: str) -> None:
        self.models()[name].kill()
        self.wait_state(name, "unloaded")

    def computed(self, name: str) -> int:
        """Tokens that the first slot of a loaded model holds; 0 where it is not loaded."""
        if name not in self.models():
            return 0
        try:
            slot = self._get(f"/slots?model={name}&autoload=false")[0]
        except (OSError, AssertionError):  # it is being loaded
            return 0
        return int(slot.get("n_prompt_tokens", 0))  # before its first request it has none

    def slot_file_of(self, model: str, action: str, name: str) -> None:
        """`save` or `restore` of the first slot of a model."""
        self._post(f"/slots/0?action={action}", {"filename": name, "model": model})

    def stat(self) -> adm.StatResponse:
        answer = block_service.ask(self._command_of_ours.socket)
        assert answer is not None, self._command_of_ours.said()[-3000:]
        return answer

    def wait(self, true: Callable[[adm.StatResponse], bool], seconds: float = 30.0) -> None:
        end = time.monotonic() + seconds
        while not true(stat := self.stat()):
            assert time.monotonic() < end, f"{stat}\n{self.log.read_text()[-3000:]}"
            time.sleep(0.02)

    def stored(self, stat: adm.StatResponse | None = None) -> int:
        """Blocks, of all models."""
        return sum(one.blocks for one in (stat or self.stat()).namespaces)

    def wait_settled(self) -> None:
        """Until what was answered is stored: nothing more comes."""
        seen: list[int] = []

        def same(stat: adm.StatResponse) -> bool:
            seen.append(self.stored(stat))
            return len(seen) > QUIET and seen[-1] > 0 and len(set(seen[-QUIET:])) == 1

        self.wait(same)

    def runner(self, name: str, requests: int = 1) -> pb.RunnerReport:
        """What the sidecar knows of the llama-server of a model that is loaded."""
        pid = self.models()[name].pid
        found: list[pb.RunnerReport] = []

        def told(stat: adm.StatResponse) -> bool:
            found[:] = [one for one in stat.runners if one.pid == pid and one.requests >= requests]
            return bool(found)

        self.wait(told)
        return found[0]

    def said_by_models(self) -> str:
        return "\n".join(line for line in self._lines() if _OF_MODEL.match(line))

    def said_by_router(self) -> str:
        return "\n".join(line for line in self._lines() if not _OF_MODEL.match(line))

    def _lines(self) -> list[str]:
        return self.log.read_text(errors="replace").splitlines()


def preset(path: Path, models: Mapping[str, Mapping[str, object]]) -> Path:
    """A file for --models-preset: the options of each model."""
    parts = ["version = 1"]
    for name, options in models.items():
        parts += ["", f"[{name}]", *(f"{key} = {value}" for key, value in options.items())]
    path.write_text("\n".join(parts) + "\n")
    return path


@contextlib.contextmanager
def waiting_client(
    router: Router, prompt: list[int], count: int, **options: object
) -> Iterator[None]:
    """Hangs up behind the block. It gets nothing before all is computed."""
    connection = http.client.HTTPConnection("127.0.0.1", router.port, timeout=10)
    with contextlib.closing(connection):
        body = json.dumps(request(prompt, count, **options))
        connection.request("POST", "/completion", body, JSON)
        yield
