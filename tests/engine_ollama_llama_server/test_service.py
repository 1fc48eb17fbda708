"""The very ExecStart lines of what `tiering systemd install` writes, with the real Ollama."""

from __future__ import annotations

import contextlib
import os
import shlex
import signal
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from ollama_tiering.launch import block_service
from ollama_tiering.protocol.pb import administration_pb2 as adm
from ollama_tiering.systemd.units import SERVER_UNIT, SIDECAR_UNIT
from tests.engine_ollama_llama_server.conftest import SHAPES
from tests.engine_ollama_llama_server.servers import Place, Stock, Up, tiering
from tests.engine_ollama_llama_server.test_ollama_llama_server import CHARACTERS, ENDS, START


class Service(Up):
    """Both units of a user, run as systemd would run them; what `Up` is asked, it is asked."""

    def __init__(self, tree: Path, place: Place, models: Path) -> None:
        super().__init__(tree, place, models, {})
        given = ("--binary", tree / "bin/ollama", "--host", self.address, "--root", "/")
        done = tiering(place, "systemd", "install", "--user", *map(str, given))
        assert done.returncode == 0, done.stderr
        self.sidecar: subprocess.Popen[bytes] | None = None

    @property
    def socket(self) -> Path:
        return self.place.root / "ollama-tiering/sidecar.sock"

    def start(self) -> Service:
        self.socket.parent.mkdir(mode=0o700, exist_ok=True)  # RuntimeDirectory
        with (self.place.root / "sidecar.log").open("ab") as log:
            self.sidecar = subprocess.Popen(
                self._words(SIDECAR_UNIT),
                env=self.place.environment(),
                stdout=log,
                stderr=log,
            )
        self.wait(lambda: block_service.ask(self.socket) is not None, "the sidecar answers")
        return super().start()

    def command(self) -> list[str]:
        return self._words(SERVER_UNIT)

    def _words(self, unit: str) -> list[str]:
        path = self.place.root / ".config/systemd/user" / unit
        lines = path.read_text().splitlines()
        (line,) = (one for one in lines if one.startswith("ExecStart="))
        words = shlex.split(line.partition("=")[2])
        run = str(self.place.root)
        return [word.replace("$$", "$").replace("%t", run, 1) for word in words]

    def kill(self) -> None:
        """The server first, and what it leaves behind, as KillMode=mixed does."""
        if self.process is not None and self.process.poll() is None:
            self.process.send_signal(signal.SIGTERM)
            self.process.wait(60)
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self.process.pid, signal.SIGKILL)
        if self.sidecar is not None:
            self.sidecar.terminate()
            self.sidecar.wait(60)

    def stat(self) -> adm.StatResponse:
        answer = block_service.ask(self.socket)
        assert answer is not None, self.said()
        return answer


@pytest.fixture
def service(tree: Path, place: Place, models: Path) -> Iterator[Service]:
    made = Service(tree, place, models)
    yield made
    made.kill()


def test_a_conversation_survives_an_unload_and_a_restart_of_the_service(
    start_stock: Callable[..., Stock], service: Service, tree: Path
) -> None:
    model = SHAPES[0]
    stock = start_stock()
    cold, hit, second_hit = (stock.generate(model, START + end) for end in ENDS)
    stock.kill()

    service.start()
    assert service.process is not None
    prefix = service.place.root / ".local/lib/ollama-tiering"
    assert Path(f"/proc/{service.process.pid}/exe").resolve() == prefix / "tree/bin/ollama"
    assert service.generate(model, START + ENDS[0]) == cold
    service.wait_stored(10)
    service.unload(model)
    assert service.generate(model, START + ENDS[1]) == hit
    (runner,) = service.runners()
    assert service.restored([runner.pid]) >= CHARACTERS * 9 // 10
    mapped = [one.path for one in runner.memory_maps()]
    assert not any(path.startswith(str(tree)) for path in mapped)  # the cache is not needed

    service.kill()
    service.start()
    assert service.generate(model, START + ENDS[2]) == second_hit
    (runner,) = service.runners()
    assert service.restored([runner.pid]) >= CHARACTERS * 9 // 10


def test_uninstall_leaves_nothing(service: Service) -> None:
    written = service.place.root / ".local"
    assert list(written.rglob("libllama-server-impl.so"))
    done = tiering(service.place, "systemd", "uninstall", "--user", "--root", "/")
    assert done.returncode == 0, done.stderr
    assert not written.exists()
