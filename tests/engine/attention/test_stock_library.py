"""`tiering patch build --cuda stock=PLACE`: the library of another Ollama, beside a patched one, is
the one that serves. The fake GPU (tests/attention/fakegpu) plays that library.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from ollama_tiering import config
from ollama_tiering.patchset import gpu_libraries, stock
from ollama_tiering.patchset.finished import source_of
from tests.engine.attention import fake_gpu
from tests.engine.harness import Server, assert_same, text, wait_until

FOLDER = "cuda_v13"

pytestmark = pytest.mark.slow  # it compiles a build of its own, 6 minutes of processor time


@pytest.fixture(scope="module")
def place(binary: Path, libraries: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An Ollama as a release lays it out, with the fake GPU's library for CUDA's."""
    root = tmp_path_factory.mktemp("stock")
    (root / "bin").mkdir()
    folder = root / "lib/ollama" / FOLDER
    folder.mkdir(parents=True)
    shutil.copy2(binary, root / "bin/ollama")
    for file in libraries.glob("libggml-base*"):
        shutil.copy2(file, root / "lib/ollama", follow_symlinks=False)
    shutil.copy2(fake_gpu.build(source_of(binary), libraries) / stock.LIBRARY, folder)
    (folder / "libcublas.so.13.0.1").write_bytes(b"not read by the fake")
    (folder / "libcublas.so.13").symlink_to("libcublas.so.13.0.1")
    return root


def _environment() -> dict[str, str]:
    """A cache of its own, always the same: a build with a fake library is not for a person to find.
    Sources, tools and Go's caches are the product's.
    """
    shared = config.cache_dir()
    own = shared / "stock-test"
    own.mkdir(parents=True, exist_ok=True)
    for name in ("source.git", "tools"):
        if (shared / name).exists() and not (own / name).is_symlink():
            (own / name).symlink_to(shared / name)
    go = {"GOCACHE": str(shared / "go/build"), "GOMODCACHE": str(shared / "go/mod")}
    return go | os.environ | {"OLLAMA_TIERING_CACHE": str(own)}


def _build(place: Path, version: tuple[int, ...]) -> subprocess.CompletedProcess[str]:
    tag = "v" + ".".join(map(str, version))
    command = [sys.executable, "-m", "ollama_tiering", "patch", "build", "--tag", tag]
    command += ["--cpu", "native", "--cuda", f"stock={place}"]
    return subprocess.run(command, env=_environment(), capture_output=True, text=True, check=False)


@pytest.fixture(scope="module")
def built(place: Path, version: tuple[int, ...]) -> Path:
    """The program that the command names in its last line."""
    done = _build(place, version)
    assert not done.returncode, done.stderr[-3000:]
    return Path(done.stdout.splitlines()[-1])


def test_the_library_lies_beside_the_build_and_is_a_copy(place: Path, built: Path) -> None:
    folder = built.parent / gpu_libraries.BELOW / FOLDER
    own, theirs = folder / stock.LIBRARY, place / "lib/ollama" / FOLDER / stock.LIBRARY
    assert own.read_bytes() == theirs.read_bytes()
    assert not own.samefile(theirs)
    assert (folder / "libcublas.so.13").samefile(theirs.with_name("libcublas.so.13.0.1"))
    (found,) = gpu_libraries.loaded_by(built, paged=False)
    assert (found.folder, found.library, found.broken) == (folder, stock.LIBRARY, ())


def test_built_again_it_is_up_to_date(place: Path, built: Path, version: tuple[int, ...]) -> None:
    before = built.stat()
    done = _build(place, version)
    assert f"{built} is up to date" in done.stderr
    assert built.stat() == before


@pytest.fixture
def installed(built: Path, libraries: Path, tmp_path: Path) -> Path:
    """As a service has it; the fake computes with a CPU library, which CUDA's does not need."""
    lib = tmp_path / "lib/ollama"
    (tmp_path / "bin").mkdir()
    shutil.copytree(built.parent / gpu_libraries.BELOW, lib, symlinks=True)
    for file in libraries.glob("libggml-cpu-*"):
        shutil.copy2(file, lib)
    return Path(shutil.copy2(built, tmp_path / "bin/ollama"))


def test_ollama_serves_with_it_as_the_cpu_does(
    installed: Path, models: Path, tmp_path: Path
) -> None:
    with Server(installed, tmp_path / "cpu", models, env=fake_gpu.NO_DEVICE) as server:
        expected = server.generate("g2", text(300, "stock"))
    with Server(installed, tmp_path / "gpu", models, env=fake_gpu.devices(1024)) as server:
        wait_until("devices", lambda: "inference compute" in server.log_text(), 60)
        found = server.generate("g2", text(300, "stock"))
        layers, of = fake_gpu.offloaded(server)
        log = server.log_text()
    assert re.search(rf"inference compute.* library=CUDA .*libdirs=\S*{FOLDER}", log)
    assert layers == of
    assert_same(found, expected)


def test_as_it_was_built_it_serves_on_the_cpu_where_there_is_no_gpu(
    built: Path, binary: Path, models: Path, tmp_path: Path
) -> None:
    """The folder of libraries has none for the CPU, whose code is in the program."""
    with Server(binary, tmp_path / "without", models) as server:
        expected = server.generate("g2", text(300, "no gpu"))
    with Server(built, tmp_path / "with", models) as server:
        found = server.generate("g2", text(300, "no gpu"))
        assert "library=CUDA" not in server.log_text()
        assert fake_gpu.offloaded(server)[0] == 0
    assert_same(found, expected)


def test_the_shim_beside_it_is_loaded_if_the_variable_says_so(
    installed: Path, models: Path, tmp_path: Path
) -> None:
    if not (installed.parents[1] / "lib/ollama" / FOLDER / gpu_libraries.SHIM).is_file():
        pytest.skip("this version has no csrc/shim")
    answers = []
    for paged, library in (("0", stock.LIBRARY), ("1", gpu_libraries.SHIM)):
        env = fake_gpu.devices(1024) | {"OLLAMA_PAGED_ATTN": paged}
        with Server(installed, tmp_path / paged, models, env=env) as server:
            answers.append(server.generate("g2", text(300, "shim")))
            log = server.log_text()
        loaded = re.findall(r"load_backend: loaded \S+ backend from \S*/(libggml-cuda\S*)", log)
        assert set(loaded) == {library}
        (expected,) = gpu_libraries.loaded_by(installed, paged=paged == "1")
        assert expected.library == library, "and doctor says so"
    assert_same(*answers)


def test_an_ollama_of_another_version_is_refused_with_one_line(
    place: Path, version: tuple[int, ...], tmp_path: Path
) -> None:
    other = tmp_path / "other"
    shutil.copytree(place, other, symlinks=True)
    program = other / "bin/ollama"
    program.write_text("#!/bin/sh\necho 'Warning: client version is 0.1.2'\n")
    program.chmod(0o755)
    done = _build(other, version)
    assert done.returncode == 4
    errors = [line for line in done.stderr.splitlines() if line.startswith("error: ")]
    tag = "v" + ".".join(map(str, version))
    assert errors == [f"error: {other} is Ollama 0.1.2, whose GGML is not known to fit {tag}"]
    assert "hint: name a release archive" in done.stderr
