"""`tiering up --web`: the page beside the server, which never stands in its way."""

from __future__ import annotations

import re
import signal
import socket
from collections.abc import Iterator

import httpx
import psutil
import pytest

from ollama_tiering.launch.address import free_address
from tests.integration.test_up import Place, wait_for
from tests.places import short_directory

pytestmark = pytest.mark.slow


@pytest.fixture
def place() -> Iterator[Place]:
    with short_directory() as root:
        made = Place(root)
        try:
            yield made
        finally:
            made.close()


def asked(url: str) -> httpx.Response:
    return httpx.get(url, trust_env=False)


def test_its_page_shows_its_sidecar_and_ends_with_it(place: Place) -> None:
    address = free_address()
    running = place.up_and_ready("--web", str(address), "--models", str(place.root / "models"))
    (line,) = (line for line in running.lines if line.startswith("  page  "))
    assert line.startswith(f"  page  {address.url}/")
    status = asked(f"{address.url}/api/live").json()["status"]
    assert status["socket"] == str(place.socket)
    said = running.end()
    assert running.process.returncode == 0
    assert said[0].startswith("stopping: ")
    with pytest.raises(httpx.ConnectError):
        asked(address.url)


def test_a_killed_one_leaves_no_page(place: Place) -> None:
    address = free_address()
    running = place.up_and_ready("--web", str(address))
    assert asked(f"{address.url}/").status_code == 200
    (page,) = (
        child
        for child in psutil.Process(running.process.pid).children()
        if "web" in child.cmdline()
    )
    running.process.send_signal(signal.SIGKILL)
    wait_for(lambda: not page.is_running() or page.status() == psutil.STATUS_ZOMBIE)
    with pytest.raises(httpx.ConnectError):
        asked(address.url)


@pytest.mark.parametrize(
    ("listen", "why"),
    [
        ("taken", "the page cannot listen on .*: Address already in use (.*--listen"),
        ("nonsense:x", "'nonsense:x' is not an address (write it like"),
    ],
)
def test_a_page_that_cannot_be_served_costs_one_line(place: Place, listen: str, why: str) -> None:
    with socket.socket() as other:
        other.bind(("127.0.0.1", 0))
        other.listen()
        word = f"127.0.0.1:{other.getsockname()[1]}" if listen == "taken" else listen
        running = place.up_and_ready("--web", word)
    assert not [line for line in running.lines if line.startswith("  page  ")]
    (line,) = (line for line in running.lines if "no page is served" in line)
    assert re.search(why.replace("(", r"\("), line)
    assert asked(f"{place.address.url}/api/version").json() == {"version": "0.16.3"}
    running.end()
    assert running.process.returncode == 0
