"""The programs, the models and a sidecar for the tests with a real llama-server.

OLLAMA_TIERING_TEST_LLAMA_SERVER        llama-server with the tiering
OLLAMA_TIERING_TEST_LLAMA_SERVER_STOCK  the same without; else the patched one without its variable

scripts/llama_server.py makes both. Without the first, all of these tests are skipped.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path

import gguf
import pytest

from ollama_tiering.models import recurrent
from ollama_tiering.models.make import make_model
from ollama_tiering.models.shapes import make_shape
from tests.engine_llama_server.gemma4 import make_target
from tests.engine_llama_server.server import LlamaServer, Starter
from tests.places import short_directory
from tests.sidecar import SidecarProcess

PATCHED = "OLLAMA_TIERING_TEST_LLAMA_SERVER"
STOCK = "OLLAMA_TIERING_TEST_LLAMA_SERVER_STOCK"
QWEN35, GEMMA4 = "qwen35-plain", "gemma4-plain"


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
        if not path.exists() and shape == GEMMA4:
            make_target(path)
        elif not path.exists():
            with pytest.MonkeyPatch.context() as patch:
                if shape == QWEN35:
                    patch.setattr(recurrent, "small", _as_llama_cpp_names_it)
                    patch.setattr(gguf.GGUFWriter, "add_head_count_kv", _the_same_in_all_layers)
                make_model(make_shape(shape.replace("-plain", "-tiny")), path)
        return path

    return made


def _the_same_in_all_layers(
    writer: gguf.GGUFWriter,
    counts: Sequence[int],
    add: Callable[..., None] = gguf.GGUFWriter.add_head_count_kv,
) -> None:
    add(writer, max(counts))


def _as_llama_cpp_names_it(
    arch: str, embd: int, small: Callable[..., dict[str, tuple[int, ...]]] = recurrent.small
) -> dict[str, tuple[int, ...]]:
    """A qwen35 that llama.cpp itself loads: Ollama's own has another name for one tensor."""
    return {
        name.replace("ssm_dt", "ssm_dt.bias"): value for name, value in small(arch, embd).items()
    }


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
    """Starts llama-server with a model, of a shape or in a file, tiered if a sidecar is given."""
    started: list[LlamaServer] = []

    def run(
        shape: str | Path,
        *options: str,
        sidecar: SidecarProcess | None = None,
        env: Mapping[str, str | None] | None = None,
    ) -> LlamaServer:
        engine = None if sidecar is None else sidecar.socket.with_name("s.engine")
        program = stock if sidecar is None else patched
        log = tmp_path / f"{len(started)}.log"
        path = shape if isinstance(shape, Path) else model(shape)
        server = LlamaServer(program, path, log, *options, sidecar=engine, env=env)
        started.append(server)
        return server.start()

    yield run
    for server in started:
        if server.process is not None and server.process.poll() is None:
            server.kill()
