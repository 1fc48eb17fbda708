"""`tiering llama-server`: real command, real sidecar, a program that acts as llama-server."""

from __future__ import annotations

import json
import signal
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest

from ollama_tiering.launch import block_service
from tests.llama_command import LlamaCommand
from tests.places import short_directory

pytestmark = pytest.mark.slow

# Writes down what it got, and ends as its first argument says.
FAKE = """\
import json, os, signal, sys, time
from pathlib import Path
names = ("OLLAMA_KV_TIER_ENGINE_SOCKET", "LLAMA_ARG_CACHE_RAM")
signal.signal(signal.SIGTERM, lambda *_: sys.exit(0))
seen = {name: os.environ.get(name) for name in names}
seen |= {"arguments": sys.argv[1:], "pid": os.getpid()}
seen["listens"] = Path(seen[names[0]] or "/nowhere").is_socket()
part = Path(sys.argv[0]).with_name("part")
part.write_text(json.dumps(seen))
part.rename(part.with_name("seen.json"))
if sys.argv[1] == "stay":
    time.sleep(60)
sys.exit(int(sys.argv[1]))
"""


class Fake:
    def __init__(self, folder: Path) -> None:
        self.program = folder / "llama-server"
        self.program.write_text(f"#!{sys.executable}\n{FAKE}")
        self.program.chmod(0o755)

    def seen(self) -> dict[str, Any]:
        end = time.monotonic() + 60
        file = self.program.with_name("seen.json")
        while not file.exists():
            assert time.monotonic() < end, "the program was not started"
            time.sleep(0.05)
        return dict(json.loads(file.read_text()))


@pytest.fixture
def command() -> Iterator[LlamaCommand]:
    with short_directory() as root, LlamaCommand(root) as made:
        yield made


def test_it_gets_its_arguments_and_the_socket(command: LlamaCommand, tmp_path: Path) -> None:
    fake = Fake(tmp_path)
    assert command.run("--program", fake.program, "--", "3", "-m", "x.gguf") == 3
    seen = fake.seen()
    assert seen["arguments"] == ["3", "-m", "x.gguf"]
    assert seen["OLLAMA_KV_TIER_ENGINE_SOCKET"] == f"{command.socket}.engine"
    assert seen["listens"]  # it was there when the program started
    assert seen["LLAMA_ARG_CACHE_RAM"] is None  # our library turns the cache off
    assert "sidecar stopped" in command.said()
    assert block_service.ask(command.socket) is None  # what we started is ended


def test_a_signal_ends_the_program_and_then_the_sidecar(
    command: LlamaCommand, tmp_path: Path
) -> None:
    fake = Fake(tmp_path)
    process = command.start("--program", fake.program, "--", "stay")
    pid = fake.seen()["pid"]
    process.send_signal(signal.SIGTERM)
    assert process.wait(60) == 0
    assert not psutil.pid_exists(pid)
    assert block_service.ask(command.socket) is None


# Waits for its model before it ends, as a router does that has passed a request on to it.
ROUTER = """\
import json, signal, subprocess, sys
from pathlib import Path
model = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)
signal.signal(signal.SIGTERM, lambda *_: sys.exit(model.wait() + signal.SIGTERM))
part = Path(sys.argv[0]).with_name("part")  # OLLAMA_KV_TIER_ENGINE_SOCKET
part.write_text(json.dumps({"model": model.pid}))
part.rename(part.with_name("seen.json"))
signal.pause()
"""


def test_a_signal_ends_the_models_of_a_router_too(command: LlamaCommand, tmp_path: Path) -> None:
    fake = Fake(tmp_path)
    fake.program.write_text(f"#!{sys.executable}\n{ROUTER}")
    process = command.start("--program", fake.program)
    model = fake.seen()["model"]
    process.send_signal(signal.SIGTERM)
    assert process.wait(20) == 0  # it is killed after 30
    assert not psutil.pid_exists(model)


def test_a_sidecar_that_runs_is_used_and_stays(command: LlamaCommand, tmp_path: Path) -> None:
    fake = Fake(tmp_path)
    first = command.start("--program", fake.program, "--", "stay")
    fake.seen()
    second = tmp_path / "second"
    second.mkdir()
    assert command.run("--program", Fake(second).program, "--", "0") == 0
    assert "using the sidecar that already runs" in command.said()
    assert block_service.ask(command.socket) is not None
    assert first.poll() is None


def test_without_a_sidecar_it_serves_as_stock_and_says_why(
    command: LlamaCommand, tmp_path: Path
) -> None:
    command.env["OLLAMA_KV_TIER_RAM"] = str(tmp_path / "file")
    (tmp_path / "file").write_text("no directory")
    fake = Fake(tmp_path)
    assert command.run("--program", fake.program, "--", "0") == 0
    seen = fake.seen()
    assert seen["OLLAMA_KV_TIER_ENGINE_SOCKET"] is None
    assert seen["LLAMA_ARG_CACHE_RAM"] is None  # its own cache is all that it has
    assert "no sidecar, so llama-server serves as stock" in command.said()


def test_no_program_and_one_without_the_tiering_are_errors(
    command: LlamaCommand, tmp_path: Path
) -> None:
    assert command.run("--", "-m", "x.gguf") == 6
    assert "hint: name one: --program, or OLLAMA_KV_TIER_LLAMA_SERVER" in command.said()
    stock = tmp_path / "llama-server"
    stock.write_text("#!/bin/sh\n")
    stock.chmod(0o755)
    assert command.run("--program", stock) == 2
    assert "has no tiering" in command.said()
    assert command.run("--program", tmp_path / "none") == 6
    assert block_service.ask(command.socket) is None  # none was started for it


def test_what_was_built_is_found(command: LlamaCommand) -> None:
    built = Path(command.env["XDG_CACHE_HOME"]) / "ollama-tiering/llama-server/mine/build/bin"
    built.mkdir(parents=True)
    fake = Fake(built)
    assert command.run("--", "0") == 0
    assert fake.seen()["arguments"] == ["0"]
