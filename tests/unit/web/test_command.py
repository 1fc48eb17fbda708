"""`tiering web`: where it listens, what it prints, and how it ends."""

from __future__ import annotations

import socket
from pathlib import Path

import httpx
import pytest

from ollama_tiering import cli
from ollama_tiering.cli.web import web
from ollama_tiering.config import state_dir
from ollama_tiering.launch.address import PAGE_PORT, Address, free_address
from ollama_tiering.web import server
from ollama_tiering.web.security import Door
from ollama_tiering.web.token import FILE_NAME
from tests.unit.web.made_up import TOKEN
from tests.unit.web.stage import page


def run(capsys: pytest.CaptureFixture[str], *words: str) -> tuple[int, str, str]:
    with pytest.raises(SystemExit) as caught:
        cli.main(["web", *words])
    assert isinstance(caught.value.code, int)
    return caught.value.code, *capsys.readouterr()


@pytest.fixture
def environment(tmp_path: Path) -> dict[str, str]:
    return {"HOME": str(tmp_path), "OLLAMA_KV_TIER_SOCKET": str(tmp_path / "s")}


def test_nothing_listens_elsewhere_than_on_this_machine_unless_it_is_said() -> None:
    (default,) = [param.default for param in web.params if param.name == "listen"]
    assert default == str(Address(port=PAGE_PORT))
    assert Door(Address(port=PAGE_PORT), TOKEN).is_local


def test_it_serves_this_user_until_it_is_interrupted(environment: dict[str, str]) -> None:
    with page(environment) as url:
        client = httpx.Client(trust_env=False)
        with client:
            assert "<title>tiering</title>" in client.get(f"{url}/").text
            # What a proxy would say of who connects is no matter.
            forwarded = {"X-Forwarded-For": "203.0.113.7"}
            assert client.get(f"{url}/", headers=forwarded).status_code == 200
            assert client.get(f"{url}/", headers={"Host": "evil.example"}).status_code == 421
            answer = client.get(f"{url}/api/live")
            assert answer.status_code == 503
            assert "no sidecar runs" in answer.json()["error"]
            assert "server" not in answer.headers


def test_another_user_of_the_machine_gets_nothing(environment: dict[str, str]) -> None:
    import os

    if os.geteuid():
        pytest.skip("only root can become another user")
    from tests.strangers import NOBODY

    with page(environment) as url:
        port = int(url.rpartition(":")[2])
        reading, writing = os.pipe()
        pid = os.fork()
        if not pid:
            try:
                os.setresuid(NOBODY, NOBODY, NOBODY)
                with socket.create_connection(("127.0.0.1", port)) as client:
                    client.sendall(f"GET / HTTP/1.1\r\nHost: 127.0.0.1:{port}\r\n\r\n".encode())
                    os.write(writing, client.recv(200))
            finally:
                os._exit(0)
        os.waitpid(pid, 0)
        assert os.read(reading, 200).startswith(b"HTTP/1.1 401 ")
        os.close(reading)
        os.close(writing)


def test_elsewhere_the_token_is_printed_in_the_address_and_lies_in_its_file(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(server, "serve", lambda _data, _door, ready: ready())
    code, out, _ = run(capsys, "--listen", "0.0.0.0:8000")
    token = (state_dir() / FILE_NAME).read_text().strip()
    assert code == 0
    assert f"page: http://127.0.0.1:8000/?token={token}\n" in out


@pytest.mark.parametrize(("user", "shown"), [(1000, ""), (0, f"?token={TOKEN}")])
def test_here_the_address_has_a_token_for_root_only_who_has_no_browser(
    user: int, shown: str
) -> None:
    door = Door(Address(port=8000), TOKEN, user=user)
    assert door.first_address == f"http://127.0.0.1:8000/{shown}"
    everywhere = Door(Address("0.0.0.0", 8000), TOKEN, user=user)
    assert everywhere.first_address == f"http://127.0.0.1:8000/?token={TOKEN}"


@pytest.mark.parametrize("word", ["x:y", "127.0.0.1:99999", "https://127.0.0.1"])
def test_what_is_no_address_is_2(word: str, capsys: pytest.CaptureFixture[str]) -> None:
    code, _, err = run(capsys, "--listen", word)
    assert code == 2
    assert "127.0.0.1:8434" in err


def test_a_port_that_is_taken_is_9(capsys: pytest.CaptureFixture[str]) -> None:
    address = free_address()
    with socket.socket() as other:
        other.bind((address.host, address.port))
        other.listen()
        code, _, err = run(capsys, "--listen", str(address))
    assert code == 9
    assert f"the page cannot listen on {address}: Address already in use" in err
    assert "--listen" in err


def test_an_address_of_another_machine_is_9(capsys: pytest.CaptureFixture[str]) -> None:
    code, _, err = run(capsys, "--listen", str(Address("192.0.2.1", 8000)))
    assert code == 9
    assert "the page cannot listen on 192.0.2.1:8000" in err
