"""An installed Ollama from v0.30 on, its tree of links, models and servers.

OLLAMA_TIERING_TEST_OLLAMA       the folder above bin/ollama and lib/ollama, with llama-server
OLLAMA_TIERING_TEST_LLAMA_CPP    llama.cpp of its llama-server: a clone, a folder or an archive
OLLAMA_TIERING_TEST_LLAMA_CACHE  where the tree is kept for the next run; else it is made each time

Without the first two, all of these tests are skipped. The libraries may be of another commit than a
release's: of an archive nobody can tell, so the tree has to pass all checks of the self-test.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from ollama_tiering.models.make import make_model
from ollama_tiering.models.shapes import make_shape
from tests.engine_ollama_llama_server.servers import Place, Stock, Up, add_model, tiering
from tests.places import short_directory

OLLAMA = os.environ.get("OLLAMA_TIERING_TEST_OLLAMA")  # before a fixture clears them
SOURCE = os.environ.get("OLLAMA_TIERING_TEST_LLAMA_CPP")
CACHE = os.environ.get("OLLAMA_TIERING_TEST_LLAMA_CACHE")
SHAPES = ("llama-tiny", "qwen2-tiny")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if Path(__file__).parent in item.path.parents:
            item.add_marker(pytest.mark.engine)
            # The limit is for a test, not for the tree that the first one may have to wait for.
            if item.get_closest_marker("timeout") is None:
                item.add_marker(pytest.mark.timeout(120, func_only=True), append=False)


@pytest.fixture(scope="session")
def installed() -> Path:
    if OLLAMA is None or SOURCE is None:
        pytest.skip("OLLAMA_TIERING_TEST_OLLAMA and OLLAMA_TIERING_TEST_LLAMA_CPP name none")
    return Path(OLLAMA)


@pytest.fixture(scope="session")
def cache(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return Path(CACHE) if CACHE else tmp_path_factory.mktemp("cache")


@pytest.fixture(scope="session")
def tree(installed: Path, cache: Path) -> Path:
    """Made, or up to date."""
    assert SOURCE is not None
    with short_directory() as root:
        given = ("--ollama", str(installed), "--llama-source", SOURCE)
        done = tiering(Place(root, cache), "patch", *given)
    assert done.returncode == 0, done.stderr
    return Path(done.stdout.splitlines()[-1]).parent.parent


@pytest.fixture(scope="session")
def models(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A directory of models of Ollama's, with one for each shape."""
    folder = tmp_path_factory.mktemp("models")
    for shape in SHAPES:
        path = folder / f"{shape}.gguf"
        make_model(make_shape(shape), path)
        add_model(folder, shape, path)
    return folder


@pytest.fixture
def place(cache: Path) -> Iterator[Place]:
    with short_directory() as root:
        yield Place(root, cache)


@pytest.fixture
def start_stock(installed: Path, place: Place, models: Path) -> Iterator[Callable[..., Stock]]:
    """Starts an `ollama serve` without our variables: the installed one, or the one given."""
    started: list[Stock] = []

    def run(program: Path | None = None, **env: str) -> Stock:
        server = Stock(program or installed / "bin/ollama", place, models, env)
        started.append(server)
        return server.start()

    yield run
    for server in started:
        server.kill()


@pytest.fixture
def start_up(
    installed: Path, tree: Path, place: Place, models: Path
) -> Iterator[Callable[..., Up]]:
    """Starts `tiering up` for the installed Ollama."""
    started: list[Up] = []

    def run(ollama: Path | None = None, **env: str) -> Up:
        server = Up(ollama or installed, place, models, env)
        started.append(server)
        return server.start()

    yield run
    for server in started:
        server.kill()
