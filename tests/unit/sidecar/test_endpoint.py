"""The endpoint for whoever watches: known paths only, and nobody holds it up."""

from __future__ import annotations

import contextlib
import http.client
import socket
import threading
import time
from collections.abc import Iterator

import pytest

from ollama_tiering.sidecar import endpoint
from ollama_tiering.sidecar.endpoint import Endpoint, HttpAnswer, HttpRequest, Page, text
from tests.unit.sidecar.scrape import free_port

SHORT_SECONDS = 0.3
PATIENCE_SECONDS = 20.0  # a busy machine's; far less than for ever


async def say_path(request: HttpRequest) -> HttpAnswer:
    return text(200, f"{request.path} {request.query}")


async def much(_: HttpRequest) -> HttpAnswer:
    return HttpAnswer(200, bytes(64 << 20))


async def fail(_: HttpRequest) -> HttpAnswer:
    raise ZeroDivisionError


PAGES: dict[str, Page] = {"/here": say_path, "/much": much, "/fails": fail}


@contextlib.contextmanager
def serving(client_seconds: float = PATIENCE_SECONDS) -> Iterator[int]:
    port = free_port()
    with Endpoint(PAGES, port, client_seconds=client_seconds):
        yield port


def asked(port: int, method: str, path: str, body: bytes | None = None) -> tuple[int, bytes]:
    client = http.client.HTTPConnection("127.0.0.1", port, timeout=PATIENCE_SECONDS)
    try:
        client.request(method, path, body)
        answer = client.getresponse()
        return answer.status, answer.read()
    finally:
        client.close()


def connected(port: int) -> socket.socket:
    return socket.create_connection(("127.0.0.1", port), timeout=PATIENCE_SECONDS)


def seconds_until_cut_off(client: socket.socket) -> float:
    start = time.monotonic()
    with contextlib.suppress(ConnectionResetError):
        assert client.recv(1) == b""
    return time.monotonic() - start


def drip(client: socket.socket, seconds: float) -> None:
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        client.sendall(b"x")
        time.sleep(SHORT_SECONDS / 10)


def test_a_page_is_answered_with_what_was_asked_for() -> None:
    with serving() as port:
        assert asked(port, "GET", "/here?a=b") == (200, b"/here a=b\n")


@pytest.mark.parametrize("path", ["/", "/her", "/here/", "/heree", "//here", "/favicon.ico"])
def test_another_path_is_404(path: str) -> None:
    with serving() as port:
        status, body = asked(port, "GET", path)
    assert status == 404
    assert b"/here" in body  # says what there is


@pytest.mark.parametrize("method", ["POST", "PUT", "DELETE", "OPTIONS"])
def test_another_method_is_405_also_with_a_body(method: str) -> None:
    with serving() as port:
        assert asked(port, method, "/here", bytes(100_000))[0] == 405


def test_head_is_answered_without_the_body() -> None:
    with serving() as port, connected(port) as client:
        client.sendall(b"HEAD /here HTTP/1.0\r\n\r\n")
        client.shutdown(socket.SHUT_WR)
        answer = b""
        while part := client.recv(4096):
            answer += part
    assert answer.startswith(b"HTTP/1.1 200 OK\r\n")
    assert b"content-length: 7\r\n" in answer.lower()
    assert answer.endswith(b"\r\n\r\n")


def test_what_is_no_http_is_400_and_a_head_without_end_is_refused() -> None:
    for sent, status in ((b"\x16\x03\x01 hello\r\n\r\n", b"400"), (b"GET /" + b"a" * 40_000, b"4")):
        with serving() as port, connected(port) as client:
            client.sendall(sent)
            assert client.recv(4096).startswith(b"HTTP/1.1 " + status)


def test_a_page_that_fails_ends_its_connection_only(caplog: pytest.LogCaptureFixture) -> None:
    with serving() as port:
        with pytest.raises((http.client.RemoteDisconnected, ConnectionResetError)):
            asked(port, "GET", "/fails")
        assert asked(port, "GET", "/here")[0] == 200
    assert "metrics request failed" in caplog.text


def test_silent_clients_hold_up_nobody_and_their_number_is_bounded() -> None:
    """More of them than there are places, each for longer than the test."""
    with serving() as port, contextlib.ExitStack() as left:
        silent = [left.enter_context(connected(port)) for _ in range(endpoint.MAX_CONNECTIONS + 8)]
        assert asked(port, "GET", "/here")[0] == 200
        for client in silent[:8]:  # the oldest went for the newest
            assert seconds_until_cut_off(client) < PATIENCE_SECONDS
        silent[-1].setblocking(False)
        with pytest.raises(BlockingIOError):
            silent[-1].recv(1)


def test_they_all_live_in_one_thread() -> None:
    before = threading.active_count()
    with serving() as port, contextlib.ExitStack() as left:
        for _ in range(endpoint.MAX_CONNECTIONS):
            left.enter_context(connected(port))
        assert asked(port, "GET", "/here")[0] == 200
        assert threading.active_count() == before + 1


def test_a_silent_client_is_cut_off_in_its_time() -> None:
    with serving(SHORT_SECONDS) as port, connected(port) as client:
        assert seconds_until_cut_off(client) < PATIENCE_SECONDS / 2


def test_a_client_that_drips_is_cut_off_in_the_same_time() -> None:
    """Each byte comes in time; all of them together do not."""
    with serving(SHORT_SECONDS) as port, connected(port) as client:
        client.sendall(b"GET /here HTTP/1.0\r\nX: ")
        with pytest.raises((BrokenPipeError, ConnectionResetError)):
            drip(client, PATIENCE_SECONDS / 2)


def test_a_client_that_does_not_read_is_cut_off() -> None:
    with serving(SHORT_SECONDS) as port, connected(port) as client:
        client.sendall(b"GET /much HTTP/1.0\r\n\r\n")
        time.sleep(4 * SHORT_SECONDS)
        got = 0
        with contextlib.suppress(ConnectionResetError):
            while part := client.recv(1 << 20):
                got += len(part)
    assert 0 < got < 64 << 20


def test_it_ends_with_its_block_whoever_is_connected() -> None:
    with serving() as port:
        client = connected(port)
    with client:
        assert seconds_until_cut_off(client) < PATIENCE_SECONDS / 2
    with pytest.raises(ConnectionRefusedError):
        connected(port)


def test_without_a_port_there_is_nothing() -> None:
    before = threading.active_count()
    with Endpoint(PAGES, 0):
        assert threading.active_count() == before


def test_a_taken_port_is_a_warning(caplog: pytest.LogCaptureFixture) -> None:
    port = free_port()
    with socket.create_server(("127.0.0.1", port)), Endpoint(PAGES, port):
        pass
    assert f"metrics not served: port={port}" in caplog.text
