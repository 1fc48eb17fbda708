"""Only the sidecar's own user and root are served, even if somebody loosens the modes."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from ollama_tiering.sidecar.peer import PeerGuard
from tests.contract.daemon import Daemon

NOBODY = 65534

# Imports first: the other user may not read the interpreter's directory.
AS_OTHER_USER = f"""
import os, socket, sys
import grpc
from ollama_tiering.sidecar.pb import block_store_pb2_grpc as rpc
from ollama_tiering.store.pb import block_store_pb2 as pb
path = sys.argv[1]
channel = grpc.insecure_channel("unix:" + path)
stub = rpc.BlockStoreStub(channel)
os.setgroups([]); os.setgid({NOBODY}); os.setuid({NOBODY})
try:
    with socket.socket(socket.AF_UNIX) as plain:
        plain.connect(path)
    print("connected")
except PermissionError:
    print("EACCES")
for _ in range(3):
    try:
        stub.Stat(pb.StatRequest(), timeout=10)
        print("SERVED")
    except grpc.RpcError as error:
        print(error.code().name)
"""


@pytest.fixture
def daemon() -> Iterator[Daemon]:
    with tempfile.TemporaryDirectory() as directory:
        Path(directory).chmod(0o711)
        with Daemon(Path(directory)) as running:
            yield running


def as_other_user(daemon: Daemon) -> list[str]:
    if os.geteuid() != 0:
        pytest.skip("acting as another user needs root")
    finished = subprocess.run(
        [sys.executable, "-c", AS_OTHER_USER, str(daemon.socket)],
        env=daemon.environment(),
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert finished.returncode == 0, finished.stderr
    return finished.stdout.split()


def test_another_user_cannot_connect(daemon: Daemon) -> None:
    assert as_other_user(daemon) == ["EACCES", "UNAVAILABLE", "UNAVAILABLE", "UNAVAILABLE"]


def test_another_user_is_not_served_through_loosened_modes(daemon: Daemon) -> None:
    daemon.socket.parent.chmod(0o755)
    daemon.socket.chmod(0o666)
    first, *answers = as_other_user(daemon)
    assert first == "connected"
    assert set(answers) <= {"PERMISSION_DENIED", "UNAVAILABLE"}, answers
    assert f"peer refused: uid={NOBODY}" in daemon.log
    assert daemon.stat().version  # its own user still is


def test_the_guard_asks_a_connection_once_and_lets_its_own_user_in(tmp_path: Path) -> None:
    path = tmp_path / "s"
    guard = PeerGuard(path)
    with socket.socket(socket.AF_UNIX) as listener, socket.socket(socket.AF_UNIX) as client:
        listener.bind(str(path))
        listener.listen()
        client.connect(str(path))
        accepted, _ = listener.accept()
        with accepted:
            assert guard.strangers() == 0
            guard._allowed = set()
            assert guard.strangers() == 0  # known already
            assert PeerGuard(path).strangers() == 0


def test_the_guard_cuts_off_a_stranger(tmp_path: Path) -> None:
    path = tmp_path / "s"
    guard = PeerGuard(path)
    guard._allowed = {12345}
    with socket.socket(socket.AF_UNIX) as listener, socket.socket(socket.AF_UNIX) as client:
        listener.bind(str(path))
        listener.listen()
        client.connect(str(path))
        accepted, _ = listener.accept()
        with accepted:
            assert guard.strangers() >= 1
            assert client.recv(1) == b""
