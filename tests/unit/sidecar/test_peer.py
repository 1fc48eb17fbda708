"""Only the sidecar's own user and root are served, even if somebody loosens the modes."""

from __future__ import annotations

import contextlib
import os
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from ollama_tiering.protocol import calls as rpc
from ollama_tiering.sidecar.peer import MAX_CONNECTIONS, PeerGuard
from ollama_tiering.store.block.pb import block_store_pb2 as pb
from tests.places import short_directory
from tests.sidecar import SidecarProcess

NOBODY = 65534

# Imports first: the other user may not read the interpreter's directory.
AS_OTHER_USER = f"""
import os, socket, sys
import grpc
from ollama_tiering.protocol import calls as rpc
from ollama_tiering.store.block.pb import block_store_pb2 as pb
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
def daemon() -> Iterator[SidecarProcess]:
    with short_directory() as directory:
        directory.chmod(0o711)
        with SidecarProcess(directory) as running:
            yield running


def as_other_user(daemon: SidecarProcess) -> list[str]:
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


def test_another_user_cannot_connect(daemon: SidecarProcess) -> None:
    assert as_other_user(daemon) == ["EACCES", "UNAVAILABLE", "UNAVAILABLE", "UNAVAILABLE"]


def test_another_user_is_not_served_through_loosened_modes(daemon: SidecarProcess) -> None:
    daemon.socket.parent.chmod(0o755)
    daemon.socket.chmod(0o666)
    first, *answers = as_other_user(daemon)
    assert first == "connected"
    assert set(answers) <= {"PERMISSION_DENIED", "UNAVAILABLE"}, answers
    assert daemon.said(f"peer refused: uid={NOBODY}") == 1  # of several calls
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


def test_connections_to_a_socket_that_stayed_private_are_not_looked_at(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "s"
    guard = PeerGuard(path)
    looks = []
    monkeypatch.setattr(guard, "_look_at_new", lambda *, strangers_too: looks.append(1) or 0)

    def looked() -> bool:
        looks.clear()
        assert guard.strangers() == 0
        return bool(looks)

    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(str(path))
        path.chmod(0o600)
        assert [looked(), looked()] == [True, True]  # only just private
        settled = time.time_ns() + 2_000_000_000
        monkeypatch.setattr("ollama_tiering.sidecar.peer.time.time_ns", lambda: settled)
        assert [looked(), looked(), looked()] == [True, False, False]
        path.chmod(0o666)
        assert [looked(), looked()] == [True, True]
        path.chmod(0o600)  # somebody may have connected meanwhile
        assert [looked(), looked()] == [True, False]
        path.unlink()
        assert [looked(), looked()] == [True, True]


def test_a_stranger_is_refused_again_however_private_the_socket_is_by_now(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "s"
    guard = PeerGuard(path)
    guard._allowed = {12345}
    settled = time.time_ns() + 60_000_000_000
    monkeypatch.setattr("ollama_tiering.sidecar.peer.time.time_ns", lambda: settled)
    with socket.socket(socket.AF_UNIX) as listener, socket.socket(socket.AF_UNIX) as client:
        listener.bind(str(path))
        listener.listen()
        client.connect(str(path))
        path.chmod(0o600)
        accepted, _ = listener.accept()
        with accepted:
            assert [guard.strangers(), guard.strangers()] == [1, 1]
        assert guard.strangers() == 0


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


def test_connections_beyond_the_bound_are_cut_off_and_said_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr("ollama_tiering.sidecar.peer.MAX_CONNECTIONS", 3)
    path = tmp_path / "s"
    guard = PeerGuard(path)
    with contextlib.ExitStack() as held:
        listener = held.enter_context(socket.socket(socket.AF_UNIX))
        listener.bind(str(path))
        listener.listen()

        def connected() -> tuple[socket.socket, socket.socket]:
            client = held.enter_context(socket.socket(socket.AF_UNIX))
            client.connect(str(path))
            accepted, _ = listener.accept()
            return client, held.enter_context(accepted)

        first = connected()
        guard.trim()
        more = [connected() for _ in range(5)]
        guard.trim()
        open_still = [client for client, _ in more if not _ended(client)]
        assert len(open_still) == 2
        assert not _ended(first[0])
        assert guard.strangers() == 0  # one too many is no stranger
        assert caplog.text.count("connection refused: pid=") == 1
        for pair in (first, *more):
            for end in pair:
                end.close()
        guard.trim()
        late, _ = connected()
        guard.trim()
        assert not _ended(late)


def _ended(client: socket.socket) -> bool:
    client.settimeout(0.05)
    try:
        return client.recv(1) == b""
    except TimeoutError:
        return False


def test_trimming_leaves_a_stranger_for_its_first_call_to_be_refused(tmp_path: Path) -> None:
    path = tmp_path / "s"
    guard = PeerGuard(path)
    guard._allowed = {12345}
    with socket.socket(socket.AF_UNIX) as listener, socket.socket(socket.AF_UNIX) as client:
        listener.bind(str(path))
        listener.listen()
        client.connect(str(path))
        accepted, _ = listener.accept()
        with accepted:
            guard.trim()
            assert guard.strangers() == 1
            assert guard.strangers() == 1  # until gRPC has closed it


def test_a_flood_of_connections_leaves_the_sidecar_serving(daemon: SidecarProcess) -> None:
    """Three times the bound, from one process that never calls."""
    assert daemon.process is not None
    descriptors = Path(f"/proc/{daemon.process.pid}/fd")
    with contextlib.ExitStack() as held, daemon.channel() as channel:
        stub = rpc.BlockStoreStub(channel)
        assert stub.Stat(pb.StatRequest(), timeout=10).version
        for _ in range(3 * MAX_CONNECTIONS // 64):
            for _ in range(64):
                one = held.enter_context(socket.socket(socket.AF_UNIX))
                one.connect(str(daemon.socket))
            assert stub.Stat(pb.StatRequest(), timeout=10).version
        daemon.wait(lambda _: len([*descriptors.iterdir()]) < MAX_CONNECTIONS + 64, "cut off")
    assert daemon.said("connection refused: ") == 1
    assert "tier failed" not in daemon.log
