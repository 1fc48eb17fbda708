"""Where Ollama listens, read as Ollama reads it; and who is there already."""

import socket
from pathlib import Path

import pytest

from ollama_tiering.errors import ServiceError, UsageError
from ollama_tiering.launch import address, ollama, up
from ollama_tiering.launch.address import Address, Occupant, parse_address, who_listens


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("", Address("127.0.0.1", 11434)),
        ("0.0.0.0", Address("0.0.0.0", 11434)),
        (":1234", Address("127.0.0.1", 1234)),
        ("localhost:1234", Address("localhost", 1234)),
        ("http://10.0.0.1:1234/", Address("10.0.0.1", 1234)),
        ("http://10.0.0.1", Address("10.0.0.1", 80)),
        ("[::1]:1234", Address("::1", 1234)),
        ("::1", Address("::1", 11434)),
        (' "127.0.0.1" ', Address("127.0.0.1", 11434)),
    ],
)
def test_addresses_are_read_as_ollama_reads_them(text: str, expected: Address) -> None:
    assert parse_address(text) == expected


@pytest.mark.parametrize("text", ["https://a", "a:b", "a:70000", "a:1/path"])
def test_what_is_no_address_is_refused(text: str) -> None:
    with pytest.raises(UsageError):
        parse_address(text)


def test_a_server_on_all_addresses_is_asked_on_the_loopback() -> None:
    assert Address("0.0.0.0", 1).url == "http://127.0.0.1:1"
    assert Address("::", 1).url == "http://[::1]:1"


def test_a_free_port_is_nobodys() -> None:
    assert who_listens(address.free_address()).occupant is Occupant.NOBODY


def test_a_port_in_time_wait_is_free() -> None:
    place = address.free_address()
    with socket.create_server((place.host, place.port)) as server:
        client = socket.create_connection((place.host, place.port))
        accepted, _ = server.accept()
        accepted.close()  # this end closes first: its port waits
        client.close()
    assert who_listens(place).occupant is Occupant.NOBODY


def test_another_process_on_the_port_is_refused_with_a_cure(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(address, "_PROBE_SECONDS", 0.1)
    place = address.free_address()
    with (
        socket.create_server((place.host, place.port)),
        pytest.raises(ServiceError, match="not Ollama listens") as caught,
    ):
        up.require_free(place)
    assert caught.value.exit_code == 9
    assert f"--host 127.0.0.1:{place.port + 1}" in str(caught.value.hint)


def test_a_stock_ollama_on_the_port_is_recognised(fake_ollama, tmp_path: Path) -> None:
    place = address.free_address()
    env = ollama.server_environment(place, None)
    server = ollama.start_server(fake_ollama.binary, place, log=tmp_path / "log", env=env)
    try:
        with pytest.raises(ServiceError, match=r"another Ollama 0\.16\.3 listens") as caught:
            up.require_free(place)
    finally:
        server.stop(seconds=10)
    assert "stop it" in str(caught.value.hint)
