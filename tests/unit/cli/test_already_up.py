"""What a second `tiering up` says of the first: only what is there."""

from __future__ import annotations

import contextlib
import os
import re
import socket
from pathlib import Path

import pytest

from ollama_tiering.cli.already_up import say_already
from ollama_tiering.errors import ServiceError
from ollama_tiering.launch import address as addresses
from ollama_tiering.launch.address import Address, beside
from ollama_tiering.launch.running_up import RunningUp
from ollama_tiering.launch.up import UpRequest, require_free

REQUEST = UpRequest(Address(port=5), Path("/s"))


def test_a_log_that_is_not_there_is_not_named(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "server.log").touch()
    record = RunningUp(pid=os.getpid(), url="u", socket="/s", ready=True)
    record.server_log, record.sidecar_log = (str(tmp_path / f"{n}.log") for n in ("server", "side"))
    say_already(REQUEST, record)
    out = capsys.readouterr().out
    assert f"  logs    {tmp_path / 'server.log'}\n" in out
    assert "side.log" not in out
    assert "  look    tiering status\n" in out
    say_already(REQUEST, RunningUp(pid=os.getpid(), url="u", socket="/other", ready=True))
    out = capsys.readouterr().out
    assert "  logs" not in out
    assert "  look    tiering status --socket /other\n" in out


def test_one_that_is_just_starting_says_so(capsys: pytest.CaptureFixture[str]) -> None:
    say_already(REQUEST, None)
    assert capsys.readouterr().out == "already starting: another `tiering up` has port 5\n"
    say_already(REQUEST, RunningUp(pid=os.getpid(), url="u", socket="/s"))
    out = capsys.readouterr().out
    assert out.startswith(f"already starting: u (process {os.getpid()})\n")
    assert "look" not in out


def test_a_port_that_is_suggested_is_free(capsys: pytest.CaptureFixture[str]) -> None:
    with contextlib.ExitStack() as taken:
        first = taken.enter_context(socket.create_server(("127.0.0.1", 0))).getsockname()[1]
        for port in (first + 1, first + 2):
            with contextlib.suppress(OSError):  # somebody else's: taken as well
                taken.enter_context(socket.create_server(("127.0.0.1", port)))
        address = Address(port=first)
        record = RunningUp(pid=os.getpid(), url="u", socket="/s", models="/models")
        say_already(UpRequest(address, Path("/s")), record)
        said = [capsys.readouterr().out]
        with pytest.raises(ServiceError) as other_models:
            say_already(UpRequest(address, Path("/s"), models=Path("/others")), record)
        with pytest.raises(ServiceError) as occupied:
            require_free(address)
        said += [other_models.value.hint or "", occupied.value.hint or ""]
    for text in said:
        (port,) = re.findall(r"tiering up --host 127\.0\.0\.1:(\d+)", text)
        assert int(port) > first + 2
        socket.create_server(("127.0.0.1", int(port))).close()


def test_where_no_port_is_near_another_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    assert 0 < beside(Address(port=65535)).port < 65535
    free = Address("127.0.0.1", 4711)
    monkeypatch.setattr(addresses, "_can_bind", lambda one: one == free)
    assert beside(Address(port=4700)) == free
