"""Ollama's two engines and llama-server on a GPU: GGML's Vulkan backend on Mesa's lavapipe, a GPU
that is a program, or its CUDA backend on an NVIDIA card.

OLLAMA_TIERING_TEST_GPU            folder with libggml-vulkan.so or libggml-cuda.so for v0.16.3
OLLAMA_TIERING_TEST_GPU_LLAMA_CPP  the same for the llama-server of scripts/llama_server.py

`make vulkan` builds both for Vulkan, sets the variables and runs these tests, and so does
`scripts/gpu_day run` for CUDA; without, they are skipped. The programs are those of tests/engine
and tests/engine_llama_server. Where the former names no stock Ollama, its place is taken by the
patched one with tiering off, which answers as stock does (tests/engine/test_off.py).
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest

from ollama_tiering.models.make import make_model
from ollama_tiering.models.shapes import ModelShape, make_shape
from tests.engine.conftest import binary, stock_binary  # noqa: F401
from tests.engine.harness import Server, Sidecar
from tests.engine_gpu.backends import Backend, backend_of, install, with_device
from tests.engine_gpu.engines import Engine, LlamaCpp, Ollama
from tests.engine_llama_server.conftest import patched, stock  # noqa: F401
from tests.places import short_directory

OLLAMA = "OLLAMA_TIERING_TEST_GPU"
LLAMA_CPP = "OLLAMA_TIERING_TEST_GPU_LLAMA_CPP"
STOCK = "OLLAMA_TIERING_TEST_STOCK"
SECONDS = 1800  # for a test: where cores are shared, a device that is a program waits for them

SHAPES: dict[str, ModelShape] = {  # two layers: the least that can be parted
    "qwen3": make_shape("qwen3-tiny", layers=2),
    "llama": make_shape("llama-tiny", layers=2),
    "gemma3": make_shape("gemma3-tiny"),
    "lfm2": make_shape("lfm2-tiny"),
    "nemotron-h": make_shape("nemotron-h-tiny"),
    "glm4moelite": make_shape("glm4moelite-tiny"),
    "llama4": make_shape("llama4-tiny"),
}


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if Path(__file__).parent in item.path.parents:
            item.add_marker(pytest.mark.engine)
            item.add_marker(pytest.mark.timeout(SECONDS, func_only=True), append=False)


def _libraries(variable: str) -> tuple[Path, Backend]:
    value = os.environ.get(variable)
    if not value:
        pytest.skip(f"{variable} names no backend of a GPU; `make vulkan` builds one")
    backend = backend_of(Path(value))
    assert backend is not None, f"{variable}={value} has no library of GGML for a GPU"
    return Path(value), backend


@pytest.fixture(scope="session")
def backend() -> Backend:
    """Of the engines."""
    return _libraries(OLLAMA if os.environ.get(OLLAMA) else LLAMA_CPP)[1]


@pytest.fixture(scope="session")
def ggufs(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    folder = tmp_path_factory.mktemp("ggufs")

    def made(name: str) -> Path:
        path = folder / f"{name}.gguf"
        if not path.exists():
            make_model(SHAPES[name], path)
        return path

    return made


@pytest.fixture
def sidecar(tmp_path: Path) -> Iterator[Sidecar]:
    with (
        short_directory(in_memory=True) as fast,
        Sidecar(tmp_path / "sidecar", fast, settings={"min_tokens": 1}) as running,
    ):
        yield running


@pytest.fixture(scope="session")
def installed(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Callable[[str], Path]:
    """Ollama's program of this fixture, beside GGML's library as an installed one has it."""
    there: dict[str, Path] = {}

    def with_libraries(fixture: str) -> Path:
        if fixture not in there:
            program: Path = request.getfixturevalue(fixture)
            folder = tmp_path_factory.mktemp(fixture)
            there[fixture] = install(program, *_libraries(OLLAMA), folder)
        return there[fixture]

    return with_libraries


@pytest.fixture(scope="session")
def made(
    request: pytest.FixtureRequest,
    ggufs: Callable[[str], Path],
    tmp_path_factory: pytest.TempPathFactory,
) -> Callable[[str], Path]:
    """Ollama's folder of models, with the one of this name in it."""
    folder = tmp_path_factory.mktemp("models")
    there: set[str] = set()

    def made(name: str) -> Path:
        if name not in there:
            maker = request.getfixturevalue("binary")
            with Server(maker, folder / "maker", folder / "store") as server:
                server.create(name, ggufs(name))
            there.add(name)
        return folder / "store"

    return made


@pytest.fixture
def begin(
    request: pytest.FixtureRequest,
    ggufs: Callable[[str], Path],
    made: Callable[[str], Path],
    installed: Callable[[str], Path],
    tmp_path: Path,
) -> Iterator[Callable[..., Engine]]:
    """Starts an engine with a model, tiered if a sidecar is given. `how`: variables of its process,
    in capitals; options of llama-server, or of requests to Ollama; how many devices it is shown.
    """
    begun: list[Engine] = []

    def start(
        kind: str, model: str, how: Mapping[str, Any], sidecar: Sidecar | None = None
    ) -> Engine:
        folder = tmp_path / f"engine{len(begun)}"
        libraries, backend = _libraries(LLAMA_CPP if kind == "llama-server" else OLLAMA)
        env = {name: str(value) for name, value in how.items() if name.isupper()}
        if how.get("devices", 1) > 1:
            if not backend.two:
                pytest.skip(f"one device, and {backend.name} cannot show it twice")
            env |= backend.two
        options = {k: v for k, v in how.items() if k not in env and k != "devices"}
        engine: Engine
        if kind == "llama-server":
            program = request.getfixturevalue("patched" if sidecar else "stock")
            script = with_device(program, libraries, folder, backend, env)
            words = [word for pair in options.items() for word in pair if word]
            engine = LlamaCpp(script, folder, ggufs(model), sidecar, backend, env, *words)
        else:
            without = "stock_binary" if STOCK in os.environ else "binary"
            program = installed("binary" if sidecar else without)
            engine = Ollama(program, folder, made(model), model, sidecar, backend, env, **options)
        begun.append(engine)
        engine.start()
        return engine

    yield start
    for engine in begun:
        engine.close()
