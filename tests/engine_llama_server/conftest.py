"""The programs, the models and a sidecar for the tests with a real llama-server.

OLLAMA_TIERING_TEST_LLAMA_SERVER        llama-server with the tiering
OLLAMA_TIERING_TEST_LLAMA_SERVER_STOCK  the same without; else the patched one without its variable

scripts/llama_server.py makes both. Without the first, all of these tests are skipped.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path

import pytest

from ollama_tiering.models.make import make_model
from ollama_tiering.models.shapes import make_shape
from tests.engine_llama_server.server import LlamaServer, Starter
from tests.places import short_directory
from tests.sidecar import SidecarProcess

PATCHED = "OLLAMA_TIERING_TEST_LLAMA_SERVER"
STOCK = "OLLAMA_TIERING_TEST_LLAMA_SERVER_STOCK"


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if Path(__file__).parent in item.path.parents:
            item.add_marker(pytest.mark.engine)


def _program(variable: str) -> Path | None:
    value = os.environ.get(variable)
    if not value:
        return None
    if not os.access(value, os.X_OK):
        pytest.fail(f"{variable}={value} is not an executable file")
    return Path(value)


@pytest.fixture(scope="session")
def patched() -> Path:
    program = _program(PATCHED)
    if program is None:
        pytest.skip(f"{PATCHED} names no llama-server")
    return program


@pytest.fixture(scope="session")
def stock(patched: Path) -> Path:
    return _program(STOCK) or patched


@pytest.fixture(scope="session")
def model(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    folder = tmp_path_factory.mktemp("models")

    def made(shape: str) -> Path:
        path = folder / f"{shape}.gguf"
        if not path.exists():
            make_model(make_shape(shape), path)
        return path

    return made


@pytest.fixture
def sidecar() -> Iterator[SidecarProcess]:
    """Its first tier in memory, if there is a tmpfs."""
    with (
        short_directory() as directory,
        short_directory(in_memory=True) as fast,
        SidecarProcess(directory, fast=fast) as running,
    ):
        yield running


@pytest.fixture
def start(
    patched: Path, stock: Path, model: Callable[[str], Path], tmp_path: Path
) -> Iterator[Starter]:
    """Starts llama-server with a model, tiered if a sidecar is given."""
    started: list[LlamaServer] = []

    def run(
        shape: str,
        *options: str,
        sidecar: SidecarProcess | None = None,
        env: Mapping[str, str | None] | None = None,
    ) -> LlamaServer:
        engine = None if sidecar is None else sidecar.socket.with_name("s.engine")
        program = stock if sidecar is None else patched
        log = tmp_path / f"{len(started)}.log"
        server = LlamaServer(program, model(shape), log, *options, sidecar=engine, env=env)
        started.append(server)
        return server.start()

    yield run
    for server in started:
        if server.process is not None and server.process.poll() is None:
            server.kill()
