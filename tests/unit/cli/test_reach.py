"""A sidecar of another user: the exit code that the page has for one that cannot be reached."""

from __future__ import annotations

import socket
from pathlib import Path

import pytest

from ollama_tiering.errors import ServiceError
from ollama_tiering.system import listener
from tests.places import short_directory
from tests.unit.cli.test_main import invoke


class Denied(socket.socket):
    def connect(self, _address: object) -> None:
        raise PermissionError(13, "Permission denied")


@pytest.mark.parametrize(
    "args", [("status",), ("ls",), ("verify",), ("gc",), ("rm", "--all", "--yes")]
)
def test_a_denied_socket_is_9_with_cause_place_and_cure(
    args: tuple[str, ...], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    with short_directory() as folder, socket.socket(socket.AF_UNIX) as server:
        path = folder / "s.sock"
        server.bind(str(path))
        server.listen()
        monkeypatch.setattr(listener.socket, "socket", Denied)
        assert invoke(*args, "--socket", str(path)) == ServiceError.exit_code
    error, hint = capsys.readouterr().err.splitlines()
    assert error == f"error: {path}: this user may not use the sidecar there"
    assert hint.startswith("hint: run this as the user who runs it")


def test_a_folder_that_may_not_be_looked_into_is_no_other_case(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def denied(_path: Path) -> bool:
        raise PermissionError(13, "Permission denied", str(_path))

    monkeypatch.setattr(Path, "is_socket", denied)
    for command in ("status", "ls"):
        assert invoke(command, "--socket", "/run/user/1/s.sock") == ServiceError.exit_code
        assert "/run/user/1/s.sock: this user may not use" in capsys.readouterr().err
