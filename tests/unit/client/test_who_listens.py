"""Nothing is sent to another user's process, whatever it says of itself."""

from __future__ import annotations

import socket
import threading
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from ollama_tiering.cli import cli
from ollama_tiering.client import BlockClient
from ollama_tiering.client import channel as channels
from ollama_tiering.client.admin_client import SidecarAdministration
from ollama_tiering.client.engine_client import ask_version
from ollama_tiering.errors import ServiceError
from ollama_tiering.launch import block_service, engine_socket
from ollama_tiering.launch.block_service import BlockService
from ollama_tiering.system.listener import OwnListener, Stranger
from tests.places import short_directory
from tests.sidecar import SidecarProcess
from tests.strangers import NOBODY, all_heard, listening_as, pretend_strangers_listen


def _block_client(path: Path) -> None:
    with BlockClient(path, fail_open=False) as client:
        client.stat()


def _administration(path: Path) -> None:
    with SidecarAdministration(path) as admin:
        admin.listing()


def _ensure(path: Path) -> None:
    BlockService(path, path.with_name("log")).ensure()


def _command(*words: str) -> Callable[[Path], None]:
    def run(path: Path) -> None:
        cli.main([*words, "--socket", str(path)], standalone_mode=False)

    run.__name__ = words[0]
    return run


WAYS: list[Callable[[Path], None]] = [
    *(_block_client, _administration, _ensure, ask_version),
    *(_command("status"), _command("ls"), _command("verify"), _command("gc", "--dry-run")),
    *(_command("pin", "00"), _command("rm", "00", "--dry-run"), _command("status", "--json")),
]


@pytest.mark.parametrize("way", WAYS)
def test_another_users_listener_hears_nothing(way: Callable[[Path], None]) -> None:
    with short_directory() as place, listening_as(NOBODY, place / "s") as heard:
        with pytest.raises(Stranger, match=f"a process of user {NOBODY} listens on"):
            way(place / "s")
        assert block_service.ask(place / "s") is None
        assert all_heard(place / "s", heard) == b""
        assert not (place / "log").exists()  # no second one was tried on its place


@pytest.mark.parametrize("way", WAYS)
def test_a_listener_that_the_system_calls_anothers_hears_nothing(
    way: Callable[[Path], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    """As any user: the system's answer is the only thing that is not real."""
    pretend_strangers_listen(monkeypatch)
    heard = []
    with short_directory() as place, socket.socket(socket.AF_UNIX) as listener:
        listener.bind(str(place / "s"))
        listener.listen()

        def listen() -> None:
            while True:
                try:
                    client, _ = listener.accept()
                except OSError:
                    return
                with client:
                    heard.append(client.recv(1 << 16))

        thread = threading.Thread(target=listen, daemon=True)
        thread.start()
        with pytest.raises(Stranger):
            way(place / "s")
        assert block_service.ask(place / "s") is None
        listener.shutdown(socket.SHUT_RDWR)
        thread.join(5)
        assert set(heard) <= {b""}


def test_llama_server_is_not_sent_to_a_strangers_engine_socket() -> None:
    with short_directory() as place, listening_as(NOBODY, place / "s") as heard:
        assert f"user {NOBODY}" in engine_socket.why_unheard(place / "s", place / "other")
        assert all_heard(place / "s", heard) == b""


def test_a_socket_that_takes_the_name_of_the_one_that_was_asked_is_not_called(
    tmp_path: Path,
) -> None:
    """The address leads to the socket that was asked, not to whoever has its name by then."""
    with (
        short_directory() as place,
        socket.socket(socket.AF_UNIX) as asked,
        socket.socket(socket.AF_UNIX) as other,
        socket.socket(socket.AF_UNIX) as client,
    ):
        asked.bind(str(place / "s"))
        asked.listen()
        with OwnListener(place / "s") as listener:
            asked.accept()[0].close()  # the one that asked
            assert listener.has_its_name()
            (place / "s").unlink()
            assert not listener.has_its_name()
            other.bind(str(place / "s"))
            other.listen()
            other.setblocking(False)
            assert not listener.has_its_name()
            client.connect(listener.address)
            asked.accept()[0].close()
            with pytest.raises(BlockingIOError):
                other.accept()


def test_a_client_asks_again_who_listens_after_a_restart(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with (
        short_directory() as fast,
        SidecarProcess(tmp_path, fast=fast) as daemon,
        BlockClient(daemon.socket, fail_open=False, lookup_seconds=10) as client,
    ):
        first = client.stat().started_unix_seconds
        while time.time() < first + 1:  # its start is said in whole seconds
            time.sleep(0.05)
        daemon.restart()
        assert client.stat().started_unix_seconds > first
        daemon.restart()
        pretend_strangers_listen(monkeypatch)
        with pytest.raises(Stranger):
            client.stat()


def test_root_may_ask_the_system_service_and_no_other_users_sidecar(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    with short_directory() as place, listening_as(NOBODY, place / "s") as heard:
        monkeypatch.setattr(channels, "SERVICE_DIR", place)
        with SidecarAdministration(place / "s") as admin, pytest.raises(ServiceError) as error:
            admin.stat(timeout_seconds=0.5)  # nobody's process answers nothing
        assert not isinstance(error.value, Stranger)
        assert all_heard(place / "s", heard)
        with BlockClient(place / "s", fail_open=False) as engine, pytest.raises(Stranger):
            engine.stat()


def test_a_lease_that_ends_after_its_client_connects_nowhere(tmp_path: Path) -> None:
    client = BlockClient(tmp_path / "s")
    client.close()
    with pytest.raises(ValueError, match="closed"):
        client._stub  # noqa: B018
    client._release([1])  # as Blocks does when they are dropped
