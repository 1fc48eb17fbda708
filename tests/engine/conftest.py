"""Binaries, models and folders for the engine tests.

OLLAMA_TIERING_TEST_BINARY      a patched ollama
OLLAMA_TIERING_TEST_STOCK       stock ollama of the same tag, built with the same flags
OLLAMA_TIERING_TEST_NO_PENDING  the patched ollama built with -tags kvtier_no_pending_rule
OLLAMA_TIERING_TEST_REPLAY      the patched ollama built with -tags kvtier_replay

What is not given is built from the product's source cache; where that is empty, tests are skipped.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from ollama_tiering import config
from ollama_tiering.errors import MissingTool
from ollama_tiering.models.make import make_model
from ollama_tiering.models.shapes import make_shape
from ollama_tiering.patchset import build, manifest
from ollama_tiering.patchset.finished import source_of
from ollama_tiering.patchset.lock import locked
from ollama_tiering.patchset.report import Report
from ollama_tiering.patchset.upstream import SourceCache
from tests.engine.attention import fake_gpu, paged
from tests.engine.harness import Server, Sidecar
from tests.places import short_directory

LIBRARIES = ("sandybridge", "haswell")  # without and with FMA; both run where AVX2 does

MODELS = {
    "g2": make_shape("qwen3-tiny"),
    "g5": make_shape("qwen3-tiny", heads=10, kv_heads=2),
    "slow": make_shape("qwen3-tiny", layers=12, embd=512, ffn=4096),
    "sliding": make_shape("gemma3-tiny"),
    "sliding256": make_shape("gemma3-tiny", head_dim=256, heads=2, kv_heads=1, window=32),
    "sinks": make_shape("gptoss-tiny"),
    "wide": make_shape("gemma3-tiny", window=4096),
    "vision": make_shape("mistral3-tiny"),
    "mrope": make_shape("qwen3vl-tiny"),
    "latent": make_shape("glm4moelite-tiny"),
    "llama": make_shape("llama-tiny"),
    "gemma2": make_shape("gemma2-tiny"),
    "cohere2": make_shape("cohere2-tiny"),
    "qwen2": make_shape("qwen2-tiny"),
    "phi": make_shape("phi-tiny"),
    "granite": make_shape("granite-tiny"),
    "mixtral": make_shape("mixtral-tiny"),
    "olmo": make_shape("olmo3-tiny"),
    "shared": make_shape("gemma4-tiny"),
    "chunks": make_shape("llama4-tiny"),
    "heads": make_shape("deepseek2-tiny"),
    "conv": make_shape("lfm2-tiny"),
    "delta": make_shape("qwen35-tiny"),
    "mamba": make_shape("nemotron-h-tiny"),
    "chat": make_shape("qwen3-tiny"),
    # Products of their weights are summed otherwise for one column than for many.
    "half": make_shape("qwen3-tiny", dtype="f16"),
    "halfllama": make_shape("llama-tiny", dtype="f16"),
    "halfsliding": make_shape("gemma3-tiny", dtype="f16"),
}
# The first version that has their architecture, or the caches by which they are tiered. Before
# v0.22.0 stock repeats a part of the text before each number, in the tokens of deepseek2 alone.
SINCE = {"shared": (0, 20, 0), **dict.fromkeys(("conv", "delta", "mamba"), (0, 17, 1))}
SINCE["heads"] = (0, 22, 0)
# What a client cannot say through the API of another vendor.
PARAMETERS = {"chat": {"num_ctx": 2048, "num_thread": 1}}


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if Path(__file__).parent in item.path.parents:
            item.add_marker(pytest.mark.engine)
            # The limit is for a test, not for the build that the first one may have to wait for.
            seconds = next((mark.args[0] for mark in item.iter_markers("timeout")), 120)
            item.add_marker(pytest.mark.timeout(seconds, func_only=True), append=False)


def _given(variable: str) -> Path | None:
    value = os.environ.get(variable)
    if not value:
        return None
    binary = Path(value)
    if not os.access(binary, os.X_OK):
        pytest.fail(f"{variable}={value} is not an executable file")
    return binary


def _built(variable: str, what: str, **options: Any) -> Path:
    """The binary that the variable names, else the product's own build of it."""
    if given := _given(variable):
        return given
    patchset, cache = manifest.load(), SourceCache()
    wanted = build.BuildOptions(cpu="native", cuda="off", **options)
    if not cache.has(wanted.tag):
        pytest.skip(
            f"no {what}: {variable} is not set and {wanted.tag} is not in the source cache "
            f"{cache.root} (run `tiering fetch`)"
        )
    try:
        return build.build(wanted, patchset, cache, Report())
    except MissingTool as missing:
        pytest.skip(f"no {what}: {missing}")


@pytest.fixture(scope="session")
def binary() -> Path:
    return _built("OLLAMA_TIERING_TEST_BINARY", "patched ollama")


@pytest.fixture(scope="session")
def version(binary: Path) -> tuple[int, ...]:
    """Of the Ollama under test, as in (0, 24, 0)."""
    nobody = {**os.environ, "OLLAMA_HOST": "127.0.0.1:1"}  # else a server that runs is asked
    done = subprocess.run(
        [binary, "--version"], env=nobody, capture_output=True, text=True, check=True
    )
    said = re.search(r"version is (\d+)\.(\d+)\.(\d+)", done.stdout + done.stderr)
    assert said, f"{binary} does not say its version: {done.stdout}{done.stderr}"
    return tuple(map(int, said.groups()))


@pytest.fixture(scope="session")
def need(version: tuple[int, ...]) -> Callable[[str], None]:
    """Skips the test where this Ollama is too old for the model."""

    def need(model: str) -> None:
        if version < (since := SINCE.get(model, version)):
            pytest.skip(f"{MODELS[model].arch} is tested from v{'.'.join(map(str, since))} on")

    return need


@pytest.fixture(scope="session")
def stock_binary() -> Path:
    return _built("OLLAMA_TIERING_TEST_STOCK", "stock ollama to compare with", stock=True)


@pytest.fixture(scope="session")
def no_pending_binary() -> Path:
    """A patched Ollama whose restores do not know of batches that are built or being computed."""
    tags = ("kvtier_no_pending_rule",)
    return _built("OLLAMA_TIERING_TEST_NO_PENDING", "ollama without the rule", go_tags=tags)


@pytest.fixture(scope="session")
def replay_binary() -> Path:
    """A patched Ollama that records all batches and does them again one after the other."""
    tags = ("kvtier_replay",)
    return _built("OLLAMA_TIERING_TEST_REPLAY", "ollama that records", go_tags=tags)


@pytest.fixture(scope="session")
def libraries(binary: Path) -> Path:
    """Two of GGML's CPU libraries, built from the binary's own patched tree; kept in the cache."""
    cmake, tree = shutil.which("cmake"), source_of(binary)
    flags = Path("/proc/cpuinfo").read_text(encoding="utf-8")
    if cmake is None or not (tree / "CMakePresets.json").is_file() or " avx2 " not in flags:
        pytest.skip(f"needs cmake, AVX2 and the patched source tree of the binary ({tree})")
    folder = config.cache_dir() / "libraries-test" / tree.parent.name
    targets = [f"ggml-cpu-{name}" for name in LIBRARIES]
    with locked(folder.with_name(f"{folder.name}.lock"), "another test builds them", Report()):
        for command in (
            [cmake, "--preset", "CPU", "-B", folder, "-DCMAKE_CUDA_COMPILER=NOTFOUND"],
            [cmake, "--build", folder, "--parallel", str(os.cpu_count()), "--target", *targets],
        ):
            done = subprocess.run(command, cwd=tree, capture_output=True, text=True, check=False)
            assert not done.returncode, done.stdout[-3000:] + done.stderr[-3000:]
    return folder / "lib/ollama"


@pytest.fixture(scope="session")
def gpu_binary(binary: Path, libraries: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The patched Ollama with a fake GPU (tests/attention/fakegpu); without one under
    fake_gpu.NO_DEVICE.
    """
    built = fake_gpu.build(source_of(binary), libraries)
    return fake_gpu.install(binary, libraries, built, tmp_path_factory.mktemp("gpu"))


@pytest.fixture(scope="session")
def together(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder of all processes that share this run's tests (pytest-xdist gives each its own)."""
    folder = tmp_path_factory.getbasetemp()
    return folder.parent if "PYTEST_XDIST_WORKER" in os.environ else folder


@pytest.fixture(scope="session")
def models(binary: Path, together: Path) -> Path:
    """A model folder with all of MODELS, for any number of servers."""
    folder, made = together / "models", together / "models/made"
    with locked(together / "models.lock", "another test makes the models", Report()):
        if not made.exists():
            with Server(binary, folder / "maker", folder / "store") as server:
                for name, shape in MODELS.items():
                    gguf = folder / f"{name}.gguf"
                    make_model(shape, gguf)
                    server.create(name, gguf, parameters=PARAMETERS.get(name, {}))
                    gguf.unlink()
            made.touch()
    return folder / "store"


@pytest.fixture(scope="session")
def paged_binary(binary: Path, gpu_binary: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The same with the shim (csrc/shim) beside the fake GPU's library."""
    return paged.install(gpu_binary, source_of(binary), tmp_path_factory.mktemp("paged") / "ollama")


@pytest.fixture(scope="session")
def exact_binary(binary: Path, libraries: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The same with a fake GPU that runs csrc's kernels (tests/attention/fakegpu/driver): those of
    paged.EMULATED.
    """
    built = fake_gpu.build(source_of(binary), libraries, driver=True)
    gpu = fake_gpu.install(binary, libraries, built, tmp_path_factory.mktemp("driver"))
    exact = paged.install(gpu, source_of(binary), tmp_path_factory.mktemp("exact") / "ollama")
    paged.put_kernels(exact)
    return exact


@pytest.fixture(scope="session")
def eight(gpu_binary: Path, models: Path, tmp_path_factory: pytest.TempPathFactory) -> str:
    """The name of a model of eight layers: 8 KiB of K/V a token, 15 MiB of weights."""
    folder = tmp_path_factory.mktemp("eight")
    gguf = folder / "eight.gguf"
    make_model(make_shape("qwen3-tiny", layers=8, kv_heads=4, ctx=1 << 17), gguf)
    with Server(gpu_binary, folder, models, env=fake_gpu.NO_DEVICE) as server:
        server.create("eight", gguf)
    return "eight"


@pytest.fixture(scope="module")
def stock(
    stock_binary: Path, models: Path, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Server]:
    """A server of stock's, for a whole file of tests."""
    with Server(stock_binary, tmp_path_factory.mktemp("stock"), models) as server:
        yield server


@pytest.fixture
def fast() -> Iterator[Path]:
    """For the RAM tier and the socket."""
    with short_directory(in_memory=True) as folder:
        yield folder


@pytest.fixture
def sidecar(tmp_path: Path, fast: Path) -> Iterator[Sidecar]:
    with Sidecar(tmp_path / "sidecar", fast) as running:
        yield running
