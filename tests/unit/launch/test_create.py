"""A model is registered by a link to its file where the server can have one, else it is sent."""

from __future__ import annotations

import contextlib
import hashlib
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

import httpx
import pytest

from ollama_tiering.launch.address import Address
from ollama_tiering.launch.ollama import Api

WEIGHTS = b"weights"
BLOB = f"sha256-{hashlib.sha256(WEIGHTS).hexdigest()}"


@dataclass
class Server:
    """Ollama's three calls, with blobs in `models`."""

    models: Path
    sent: list[bytes] = field(default_factory=list)
    created: list[str] = field(default_factory=list)

    def answer(self, request: httpx.Request) -> httpx.Response:
        place = request.url.path.removeprefix("/api/")
        if place == "create":
            self.created.append(request.read().decode())
            return httpx.Response(200)
        blob = self.models / place.replace(":", "-")
        if request.method == "HEAD":
            return httpx.Response(200 if blob.exists() else 404)
        self.sent.append(request.read())
        return httpx.Response(201)


@pytest.fixture
def server(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Server:
    made = Server(tmp_path / "models")

    @contextlib.contextmanager
    def client(_: Api) -> Iterator[httpx.Client]:
        transport = httpx.MockTransport(made.answer)
        with httpx.Client(base_url="http://ollama", transport=transport) as one:
            yield one

    monkeypatch.setattr(Api, "_client", client)
    return made


@pytest.fixture
def gguf(tmp_path: Path) -> Path:
    path = tmp_path / "m.gguf"
    path.write_bytes(WEIGHTS)
    return path


def test_the_weights_lie_on_the_disk_once(server: Server, gguf: Path) -> None:
    for _ in range(2):  # a second server of the same directory
        Api(Address()).create("m", gguf, models=server.models)
    assert (server.models / "blobs" / BLOB).samefile(gguf)
    assert not server.sent
    assert len(server.created) == 2
    assert BLOB.replace("-", ":") in server.created[0]


def test_where_no_link_can_be_made_they_are_sent(
    server: Server, gguf: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_: object) -> None:
        raise OSError(18, "Invalid cross-device link")

    monkeypatch.setattr(Path, "hardlink_to", refuse)
    Api(Address()).create("m", gguf, models=server.models)
    assert server.sent == [WEIGHTS]
    assert len(server.created) == 1
