"""A sidecar whose sockets somebody removed makes them again; who is connected stays so."""

from __future__ import annotations

import contextlib
import os
import shutil
import socket
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from ollama_tiering.client import BlockClient
from ollama_tiering.client.engine_client import ask_version
from ollama_tiering.errors import ServiceError
from ollama_tiering.launch import block_service
from ollama_tiering.sidecar.held_socket import hold_socket
from ollama_tiering.system.locks import lock_file
from tests.places import short_directory
from tests.sidecar import SidecarProcess

WAIT_SECONDS = 30.0


@pytest.fixture
def daemon(tmp_path: Path) -> Iterator[SidecarProcess]:
    with short_directory() as fast, SidecarProcess(tmp_path, fast=fast) as running:
        yield running


def engine_socket(daemon: SidecarProcess) -> Path:
    return daemon.socket.with_name(daemon.socket.name + ".engine")


def remove_first(daemon: SidecarProcess) -> None:
    daemon.socket.unlink()


def remove_engine(daemon: SidecarProcess) -> None:
    engine_socket(daemon).unlink()


def remove_locks(daemon: SidecarProcess) -> None:
    for path in daemon.socket.parent.glob("*.lock"):
        path.unlink()


def remove_all(daemon: SidecarProcess) -> None:
    shutil.rmtree(daemon.socket.parent)


def replace_directory(daemon: SidecarProcess) -> None:
    """As a logout, and a login after it."""
    shutil.rmtree(daemon.socket.parent)
    daemon.socket.parent.mkdir(mode=0o700)


def leave_dead_ones(daemon: SidecarProcess) -> None:
    for path in (daemon.socket, engine_socket(daemon)):
        path.unlink()
        with socket.socket(socket.AF_UNIX) as dead:
            dead.bind(str(path))


WAYS = [
    *(remove_first, remove_engine, remove_locks, remove_all, replace_directory, leave_dead_ones),
]


def answers(daemon: SidecarProcess) -> bool:
    try:
        ask_version(engine_socket(daemon))
    except (ServiceError, OSError):
        return False
    return block_service.ask(daemon.socket) is not None


def is_locked(daemon: SidecarProcess) -> bool:
    """Whether no second sidecar could take the place."""
    for path in (daemon.socket, engine_socket(daemon)):
        if not (lock := path.with_name(path.name + ".lock")).exists():
            return False
        try:
            lock_file(lock, "a test")
        except ServiceError:
            continue
        return False
    return True


@pytest.mark.parametrize("way", WAYS)
def test_what_was_removed_is_made_again(
    daemon: SidecarProcess, way: Callable[[SidecarProcess], None]
) -> None:
    with BlockClient(daemon.socket, fail_open=False, lookup_seconds=10) as client:
        first = client.stat().started_unix_seconds
        way(daemon)
        end = time.monotonic() + WAIT_SECONDS
        while not (daemon.log.count("socket made again") and answers(daemon)):
            assert time.monotonic() < end, daemon.log
            time.sleep(0.05)
        while not is_locked(daemon):
            assert time.monotonic() < end, daemon.log
            time.sleep(0.05)
        assert client.stat().started_unix_seconds == first
        assert daemon.socket.stat().st_mode & 0o777 == 0o600
        assert engine_socket(daemon).stat().st_mode & 0o777 == 0o600
        assert daemon.socket.parent.stat().st_mode & 0o777 == 0o700
    assert daemon.stop() == 0
    assert not [path for path in daemon.socket.parent.iterdir() if path.is_socket()]


def test_it_is_made_again_each_time(daemon: SidecarProcess) -> None:
    for _ in range(3):
        remove_all(daemon)
        end = time.monotonic() + WAIT_SECONDS
        while not answers(daemon):
            assert time.monotonic() < end, daemon.log
            time.sleep(0.05)


def test_a_name_that_another_sidecar_has_by_now_is_left_to_it(daemon: SidecarProcess) -> None:
    path = daemon.socket
    remove_all(daemon)
    path.parent.mkdir(mode=0o700)
    with contextlib.closing(socket.socket(socket.AF_UNIX)) as other, hold_socket(path) as held:
        other.bind(held.address())
        other.listen()
        held.show()
        inode = path.stat().st_ino
        end = time.monotonic() + WAIT_SECONDS
        while "nobody can reach the sidecar" not in daemon.log:
            assert time.monotonic() < end, daemon.log
            time.sleep(0.05)
        assert path.stat().st_ino == inode
    while not answers(daemon):  # once that one has gone
        assert time.monotonic() < end, daemon.log
        time.sleep(0.05)


def test_what_another_one_put_there_is_not_removed_at_the_end() -> None:
    with short_directory() as place, socket.socket(socket.AF_UNIX) as ours:
        path = place / "s"
        with hold_socket(path) as held:
            ours.bind(held.address())
            ours.listen()
            held.show()
            assert held.lost() == ""
            path.unlink()
            path.touch()
            assert held.lost() == "another one has its name"
        assert path.exists()


@pytest.mark.parametrize("name", ["s", "sidecar.sock", "a,b", "\udcff", "é", "x" * 90])
def test_a_socket_of_any_name_can_be_bound(name: str) -> None:
    """gRPC takes a comma for the end of an address; a longer name than the socket's may not fit."""
    with short_directory() as place, socket.socket(socket.AF_UNIX) as ours:
        with hold_socket(place / name) as held:
            assert "," not in held.address()
            assert len(os.fsencode(held.address())) < 64
            ours.bind(held.address())
            ours.listen()
            held.show()
            assert held.lost() == ""
            assert (place / name).is_socket()
        assert sorted(path.name for path in place.iterdir()) == [name + ".lock"]
