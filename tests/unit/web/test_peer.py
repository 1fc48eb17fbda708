"""Whose process is at the other end of a connection on loopback."""

from __future__ import annotations

import contextlib
import os
import socket
from collections.abc import Iterator

import pytest

from ollama_tiering.web.peer import peer_user
from tests.strangers import NOBODY

FAMILIES = {"127.0.0.1": socket.AF_INET, "::1": socket.AF_INET6}


@contextlib.contextmanager
def listening(host: str) -> Iterator[socket.socket]:
    with socket.socket(FAMILIES[host]) as server:
        try:
            server.bind((host, 0))
        except OSError:
            pytest.skip(f"this machine has no {host}")
        server.listen()
        yield server


def asked(connection: socket.socket) -> int | None:
    return peer_user(connection.getpeername()[:2], connection.getsockname()[:2])


@pytest.mark.parametrize("host", FAMILIES)
def test_it_is_this_user(host: str) -> None:
    with listening(host) as server, socket.create_connection(server.getsockname()[:2]):
        connection, _ = server.accept()
        with connection:
            assert asked(connection) == os.geteuid()
            here, port = connection.getsockname()[:2]
            assert peer_user(connection.getpeername()[:2], (here, port + 1)) is None
            assert peer_user((here, port + 1), (here, port)) is None


@pytest.mark.parametrize("host", FAMILIES)
def test_it_is_another_user(host: str) -> None:
    if os.geteuid():
        pytest.skip("only root can become another user")
    with listening(host) as server:
        pid = os.fork()
        if not pid:
            try:
                os.setresuid(NOBODY, NOBODY, NOBODY)
                client = socket.create_connection(server.getsockname()[:2])
                client.recv(1)  # until the answer
            finally:
                os._exit(0)
        connection, _ = server.accept()
        with connection:
            assert asked(connection) == NOBODY
        os.waitpid(pid, 0)


def test_a_closed_connection_is_nobodys() -> None:
    """The kernel lists what is left of it as root's."""
    with listening("127.0.0.1") as server:
        client = socket.create_connection(server.getsockname())
        connection, _ = server.accept()
        with connection:
            client.close()
            assert asked(connection) is None


@pytest.mark.parametrize("host", ["testclient", "", "203.0.113.7"])
def test_another_machine_or_no_address_is_nobody(host: str) -> None:
    assert peer_user((host, 1), ("127.0.0.1", 2)) is None
