"""The very command that `ollama.service` has with our drop-in, with the real Ollama: it is tiered,
its answers are stock's, and an update or `--restore` makes it stock.
"""

from __future__ import annotations

import shutil
from collections.abc import Mapping, Sequence
from pathlib import Path

import psutil
import pytest

from ollama_tiering.systemd import service
from ollama_tiering.systemd.manager import Manager
from ollama_tiering.systemd.plan import InstallRequest
from tests.engine.harness import Server, Sidecar, assert_same, in_memory, text
from tests.unit.systemd.ollama_service import NAME, OllamaService

MODEL = "g2"


class ReplacedServer(Server):
    """Started as systemd starts the service."""

    def __init__(self, units: Path, folder: Path, models: Path, socket: Path) -> None:
        super().__init__(units, folder, models)
        self.service, self.socket = OllamaService(units), socket

    def _start(self, command: Sequence[str | Path], environment: Mapping[str, str]) -> None:
        said = self.service.environment()
        if "OLLAMA_KV_TIER_SOCKET" in said:
            assert said["OLLAMA_KV_TIER_SOCKET"] == "%t/ollama-tiering/sidecar.sock"
            said["OLLAMA_KV_TIER_SOCKET"] = str(self.socket)
        gate = {"OLLAMA_KV_TIER_GATE": "restore"}
        super()._start(self.service.command(), {**environment, **said, **gate})

    @property
    def program(self) -> Path:
        return Path(psutil.Process(self.pid).exe())


@pytest.fixture
def installed(stock_binary: Path, tmp_path: Path) -> Path:
    """The installed stock Ollama."""
    program = tmp_path / "usr/bin/ollama"
    program.parent.mkdir(parents=True)
    shutil.copy2(stock_binary, program)
    (tmp_path / "usr/lib").mkdir()
    (tmp_path / "usr/lib/ollama").symlink_to(stock_binary.parent / "build/lib/ollama")
    return program


def test_the_service_restores_what_it_stored_and_answers_as_stock_does(
    binary: Path,
    installed: Path,
    models: Path,
    stock: Server,
    sidecar: Sidecar,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path / "config"))
    request = InstallRequest(
        user_mode=True, prefix=tmp_path / "prefix", binary=binary, replaces=True
    )
    units = request.unit_directory
    units.mkdir(parents=True)
    theirs = (
        f"[Service]\nExecStart={installed} serve\n"
        'Environment="OLLAMA_CPU_ATTENTION=stock"\n'  # so that its bits are stock's
    )
    (units / NAME).write_text(theirs)
    manager = Manager(user_mode=True, root=tmp_path)
    service.install(request, manager, dry_run=False, now=False)

    prompt = text(700, "replaced")
    with ReplacedServer(units, tmp_path / "server", models, sidecar.socket) as server:
        assert server.program == tmp_path / "prefix/bin/ollama"
        server.generate(MODEL, prompt)
        server.restart()
        got = server.generate(MODEL, prompt)
        assert server.restores()
        assert got.resumed >= 600
        assert_same(got, in_memory(stock, MODEL, prompt, got.resumed))

        with installed.open("ab") as program:
            program.write(b"\0")
        server.restart()
        assert server.program == installed
        assert "tiering: Ollama starts as stock: " in server.log_text()
        cold = in_memory(stock, MODEL, prompt, 0)
        assert_same(server.generate(MODEL, prompt), cold)

        assert service.restore(request, manager, dry_run=False)
        server.restart()
        assert server.program == installed
        assert_same(server.generate(MODEL, prompt), cold)
    assert (units / NAME).read_text() == theirs
