"""Ollama with a GPU that is not there: the library of `tests/attention/fakegpu`, built and put
where GGML's loader takes it for CUDA's.

It is compiled against headers and libraries of the tree that the binary under test was built from,
and kept in the cache. Its devices compute with the GGML CPU library that lies beside the binary, so
what a device answers is, to the bit, what the same program answers without one.
"""

from __future__ import annotations

import hashlib
import re
import shutil
import subprocess
from collections.abc import Iterable
from pathlib import Path

import pytest

from ollama_tiering import config
from ollama_tiering.patchset.lock import locked
from ollama_tiering.patchset.report import Report
from tests.engine.harness import Server

SOURCES = Path(__file__).parents[2] / "attention" / "fakegpu"
CSRC = Path(__file__).parents[3] / "csrc"
DRIVER = "libcuda.so.1"
GGML = Path("ml/backend/ggml/ggml")
MINIMUM_MIB = 457  # that Ollama leaves alone of every device, v0.16.3 ml/device.go:348
NO_DEVICE = {"OLLAMA_LLM_LIBRARY": "cpu"}  # no folder of libraries has that name

_OFFLOADED = re.compile(r"offloaded (\d+)/(\d+) layers to GPU")


def build(tree: Path, libraries: Path, *, driver: bool = False) -> Path:
    """The folder with libggml-cuda.so and `check`, from this source and that GGML. With `driver`
    the library is the CUDA driver, too, and runs csrc's kernels (tests/attention/fakegpu/driver),
    and `op` lies beside it.
    """
    compiler = shutil.which("g++")
    if compiler is None or not (tree / GGML / "src/ggml-backend-impl.h").is_file():
        pytest.skip(f"needs g++ and the source tree of the binary ({tree})")
    base = libraries / "libggml-base.so.0"
    sources = sorted(file for file in SOURCES.iterdir() if file.suffix in (".cpp", ".h"))
    beside: list[Path] = []
    if driver:
        sources += sorted((SOURCES / "driver").iterdir())
        beside = sorted(file for part in ("cuda", "emulate") for file in (CSRC / part).rglob("*.*"))
    seen = hashlib.sha256()
    for file in (*sources, *beside, *sorted((tree / GGML).glob("*/ggml*.h")), base):
        seen.update(file.read_bytes())
    seen.update(subprocess.check_output([compiler, "--version"]))
    kind = tree.parent.name + "-driver" * driver
    folder = config.cache_dir() / "fakegpu-test" / kind / seen.hexdigest()[:16]
    kept = folder.parent
    with locked(kept.with_name(f"{kind}.lock"), "another test builds it", Report()):
        if not folder.is_dir():
            shutil.rmtree(kept, ignore_errors=True)  # of earlier sources
            fresh = folder.with_suffix(".new")
            fresh.mkdir(parents=True)
            _compile([compiler], tree, base, sources, fresh, driver)
            fresh.rename(folder)
    return folder


def _compile(
    command: list[str | Path],
    tree: Path,
    base: Path,
    sources: list[Path],
    folder: Path,
    driver: bool,
) -> None:
    programs = [file for file in sources if file.name in ("check.cpp", "op.cpp")]
    parts = [one for one in sources if one.suffix == ".cpp" and one not in programs]
    command += ["-std=c++17", "-O1", "-g", "-Wall", "-Wextra", "-Wshadow", "-Werror"]
    command += ["-isystem", tree / GGML / "include", "-isystem", tree / GGML / "src"]
    if driver:  # fibers jump between stacks, which fortified longjmp refuses
        command += ["-DPA_EMULATE", "-U_FORTIFY_SOURCE", "-Wno-unknown-pragmas"]
        command += ["-I", CSRC, "-I", CSRC / "include"]
    command += ["-pthread", "-Wl,-rpath,$ORIGIN/..:$ORIGIN", "-Wl,--no-undefined"]
    shared = ["-shared", "-fPIC", "-fvisibility=hidden"]
    commands = [[*command, *shared, *parts, base, "-ldl", "-o", folder / "libggml-cuda.so"]]
    commands += [[*command, one, base, "-ldl", "-o", folder / one.stem] for one in programs]
    for each in commands:
        done = subprocess.run(each, capture_output=True, text=True, check=False)
        assert not done.returncode, done.stderr[-3000:]


def install(binary: Path, libraries: Path, built: Path, folder: Path) -> Path:
    """A program in `folder` that finds GGML's base and best CPU library, and the fake GPU."""
    lib = folder / "lib/ollama"
    (folder / "bin").mkdir(parents=True)
    (lib / "cuda_fake").mkdir(parents=True)
    for file in libraries.glob("libggml-*"):
        shutil.copy2(file, lib, follow_symlinks=False)
    shutil.copy2(built / "libggml-cuda.so", lib / "cuda_fake")
    for name in ("check", "op"):
        if (built / name).is_file():
            shutil.copy2(built / name, lib / "cuda_fake")
    return shutil.copy2(binary, folder / "bin/ollama")


def devices(*vram_mib: int, **settings: str | int) -> dict[str, str]:
    """The environment of a server with so many devices of so much memory. What else there is to
    set, and what it means: `tests/attention/fakegpu/settings.h`.
    """
    chosen = {"VRAM_MB": ",".join(map(str, vram_mib)), **settings}
    return {f"FAKEGPU_{name}": str(value) for name, value in chosen.items()}


def offloaded(server: Server) -> tuple[int, int]:
    """Layers on a device, and layers, of the model that was loaded last."""
    found = _OFFLOADED.findall(server.log_text())
    assert found, f"no layers were assigned\n{server.log_tail()}"
    return int(found[-1][0]), int(found[-1][1])


def computed(lines: Iterable[str]) -> dict[int, int]:
    """By device: how many nodes of attention were launched on it, of the lines of its log."""
    counts: dict[int, int] = {}
    for line in lines:
        if graph := re.search(r"device (\d+): graph of \d+ nodes, (\d+) of attention", line):
            device, nodes = map(int, graph.groups())
            counts[device] = counts.get(device, 0) + nodes
    return counts
