"""Before llama-server is started, the engine socket is asked whether it would be heard."""

from __future__ import annotations

import os
import socket
import struct
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from ollama_tiering.errors import ServiceError
from ollama_tiering.launch import up
from ollama_tiering.launch.address import Address
from ollama_tiering.launch.engine_socket import why_unheard
from ollama_tiering.launch.supervise import Interrupts
from ollama_tiering.launch.up import UpRequest
from ollama_tiering.patchset.llama_server.installation import InstalledOllama
from ollama_tiering.patchset.report import Report
from ollama_tiering.protocol.engine import messages as m
from ollama_tiering.protocol.engine.messages import EngineFailure, Kind
from ollama_tiering.protocol.engine.wire import VERSION, frame
from ollama_tiering.protocol.pb import administration_pb2 as adm
from tests.places import short_directory
from tests.sidecar import SidecarProcess


@pytest.fixture
def root() -> Iterator[Path]:
    with short_directory() as folder:
        yield folder


def test_a_sidecar_of_today_hears_it_and_keeps_nothing_of_the_question(tmp_path: Path) -> None:
    with SidecarProcess(tmp_path) as daemon:
        engine = daemon.socket.with_name(daemon.socket.name + ".engine")
        assert why_unheard(engine, daemon.socket) == ""
        stat = daemon.stat()
        assert not stat.runners
        assert not stat.namespaces
        assert "refused" not in daemon.log


@contextmanager
def sidecar_that_says(path: Path, answer: bytes) -> Iterator[list[bytes]]:
    """Answers one engine so."""
    heard: list[bytes] = []
    with socket.socket(socket.AF_UNIX) as listening:
        listening.bind(str(path))
        listening.listen()

        def serve() -> None:
            client, _ = listening.accept()
            with client:
                heard.append(client.recv(4096))
                client.sendall(answer)

        thread = threading.Thread(target=serve, daemon=True)
        thread.start()
        yield heard
        thread.join(10)


def test_a_sidecar_of_another_version_is_named_with_the_cure(root: Path) -> None:
    said = m.Failed(EngineFailure.VERSION, "version 2 is not spoken here, but 1").pack()
    (root / "s.lock").write_text(str(os.getpid()))
    with sidecar_that_says(root / "e", frame(Kind.FAILED, said)) as heard:
        why = why_unheard(root / "e", root / "s")
    assert "another version of ollama-tiering: version 2 is not spoken here, but 1" in why
    assert "start it anew: " in why
    assert str(os.getpid()) in why or "systemctl" in why
    assert heard == [frame(Kind.HELLO, b"KVTENG\r\n" + struct.pack("<I", VERSION))]


def test_a_refusal_of_another_kind_and_silence(root: Path) -> None:
    said = m.Failed(EngineFailure.INTERNAL, "it is broken").pack()
    with sidecar_that_says(root / "e", frame(Kind.FAILED, said)):
        assert "refuses engines: it is broken" in why_unheard(root / "e", root / "s")
    with sidecar_that_says(root / "f", b""):
        assert "does not answer on its engine socket" in why_unheard(root / "f", root / "s")
    why = why_unheard(root / "none", root / "s")
    assert f"does not answer on its engine socket {root}/none" in why


class FakeService:
    """A sidecar that answers."""

    socket = Path("/nowhere")
    child = None
    given_up = False

    def ensure(self, _interrupted: Any) -> adm.StatResponse:
        return adm.StatResponse(version="0.1.0")

    def why_not(self, error: Exception) -> str:
        return str(error)

    def give_up(self) -> None:
        self.given_up = True


def started(request: UpRequest, service: Any) -> adm.StatResponse | None:
    return up._start_sidecar(request, service, None, Interrupts(), Report(quiet=True))


def request_for(root: Path, engine: Path | None, *, llama_server: bool = True) -> UpRequest:
    installed = InstalledOllama(root / "bin/ollama", root / "lib")
    return UpRequest(
        Address(),
        root / "s",
        llama_server=llama_server,
        engine_socket=engine,
        installed=installed if llama_server else None,
    )


def test_unheard_it_serves_as_stock_and_one_line_says_why(
    root: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    service = FakeService()
    assert started(request_for(root, None), service) is None
    assert service.given_up
    said = capsys.readouterr().err
    assert "Ollama serves as stock, without its cache: the engine socket beside" in said
    assert "more than 107 bytes" in said
    assert "sidecar.engine_socket" in said
    assert "no sidecar" not in said
    assert started(request_for(root, root / "none"), FakeService()) is None
    assert "does not answer on its engine socket" in capsys.readouterr().err


def test_the_go_engine_needs_no_engine_socket(root: Path) -> None:
    service = FakeService()
    assert started(request_for(root, None, llama_server=False), service) is not None
    assert not service.given_up


def test_a_sidecar_that_does_not_start_is_another_line(
    root: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: Any) -> adm.StatResponse:
        raise ServiceError("it does not start")

    monkeypatch.setattr(FakeService, "ensure", fail)
    assert started(request_for(root, root / "e"), FakeService()) is None
    assert "no sidecar, so Ollama serves as stock" in capsys.readouterr().err
