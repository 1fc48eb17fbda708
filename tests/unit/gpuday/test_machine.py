"""What travels to a machine with a GPU, and what is made of it there."""

from __future__ import annotations

from pathlib import Path

import pytest

from ollama_tiering import config
from ollama_tiering.patchset import binary, finished
from ollama_tiering.patchset.run import Finished
from scripts.gpuday import command, machine, pack, steps
from scripts.gpuday.steps import DONE, LACKING, PACK_CURE, Day, Outcome

CARDS = [
    "NVIDIA H100 80GB HBM3, 580.159.04, 81559 MiB, 9.0, 5",
    "Quadro M6000, 535.1, 12288 MiB, 5.2, 3",
]
BUILD = "builds/v0.16.3-native/1"


def write(folder: Path, *names: str) -> None:
    for name in names:
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(name)


@pytest.fixture
def day(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Day:
    """Its pack is made of a finished build and its tree, as they lie in the product's cache."""
    write(tmp_path, f"{BUILD}/ollama")
    ggml = "ml/backend/ggml/ggml/src/ggml.c"
    write(tmp_path / "trees/v0.16.3-native/src", "CMakeLists.txt", "main.go", ggml)
    monkeypatch.setattr(binary, "ready_binary", lambda: tmp_path / BUILD / "ollama")
    monkeypatch.setattr(finished, "folder_of", lambda program: program.parent)
    monkeypatch.setattr(config, "cache_dir", lambda: tmp_path)
    monkeypatch.setattr(pack, "install", lambda site: write(site, "thing/__init__.py"))
    for module in (command, pack):
        monkeypatch.setattr(module, "PACK", tmp_path / "pack.tar.xz")
    monkeypatch.setattr(machine, "gpus", lambda: CARDS)
    made = Day(tmp_path / "out", tmp_path / "work")
    made.write()
    return made


def unpack(day: Day, monkeypatch: pytest.MonkeyPatch) -> set[str]:
    """The files in the work folder after a run; `gpu_day pack` was before it."""
    assert command.main(["pack"]) == 0
    monkeypatch.setattr(steps, "run", lambda *_: None)
    command.run(day, 1)
    files = {str(p.relative_to(day.work)) for p in day.work.rglob("*") if p.is_file()}
    return files - {steps.STATE}


def test_what_is_unpacked_is_what_was_packed(day: Day, monkeypatch: pytest.MonkeyPatch) -> None:
    packed = {
        *("pack.json", "site/thing/__init__.py", "program/ollama", "ggml/CMakeLists.txt"),
        "ggml/ml/backend/ggml/ggml/src/ggml.c",
    }
    assert unpack(day, monkeypatch) == packed
    assert (day.work / "program/ollama").read_text() == f"{BUILD}/ollama"
    assert any("for processors like" in line for line in machine.look(day).lines)


def test_a_build_for_all_processors_takes_its_libraries_along(
    day: Day, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    write(tmp_path / BUILD / "build/lib/ollama", "libggml-cpu-haswell.so", "libggml-cuda.so")
    files = unpack(day, monkeypatch)
    assert "program/libggml-cpu-haswell.so" in files
    assert "program/libggml-cuda.so" not in files
    assert any("for all processors" in line for line in machine.look(day).lines)


def test_a_look_says_what_is_there(day: Day, monkeypatch: pytest.MonkeyPatch) -> None:
    lacking = machine.look(day)
    assert (lacking.status, lacking.cure) == (LACKING, PACK_CURE)
    (day.work / steps.ABOUT).write_text('{"commit": "abc1234"}')
    outcome = machine.look(day)
    assert outcome.status == DONE
    head = "\n".join(outcome.figures["head"])
    assert "commit abc1234\n" in head
    assert f"\n- GPU: {CARDS[0]} (name,driver" in head


def test_gpus_are_what_the_driver_says(monkeypatch: pytest.MonkeyPatch) -> None:
    said = ["\n".join(CARDS), "No devices were found\n"]
    monkeypatch.setattr(machine, "run", lambda *_, **__: Finished(0, said.pop(0), ()))
    assert machine.gpus() == CARDS
    assert machine.gpus() == []
    assert list(map(machine.architecture, CARDS)) == ["90a-real", "52-real"]


def test_a_compiler_without_cublas_is_put_together_with_wheels(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    cuda, site, folder = tmp_path / "cuda", tmp_path / "site", tmp_path / "toolkit"
    write(cuda, "bin/nvcc", "include/cuda_runtime.h", "lib64/libcudart.so", "lib64/libcudadevrt.a")
    write(site / "nvidia/cu13", "include/cublas_v2.h", "lib/libcublas.so.13")
    write(site / "nvidia/cudnn", "include/cudnn.h", "lib/libcudnn.so.9")
    monkeypatch.setattr(machine.sys, "path", [str(site)])
    assert machine.toolkit(cuda / "bin/nvcc", folder) == folder
    names = {
        path.name for place in ("bin", "include", "lib64") for path in (folder / place).iterdir()
    }
    assert names == {
        *("nvcc", "cuda_runtime.h", "cublas_v2.h", "libcudart.so", "libcudadevrt.a"),
        *("libcublas.so", "libcublas.so.13"),
    }
    write(cuda, "lib64/libcublas.so", "lib64/libcublasLt.so")
    assert machine.toolkit(cuda / "bin/nvcc", folder) == cuda  # whole


FAKES = {
    "nvcc": "echo release 13.0, V13.0.88",
    "ldconfig": "",
    "cmake": """[ "$1" = --version ] && echo cmake version 3.28.0 && exit
echo "$@" >>"$0.said"
[ "$1" = --build ] || exit 0
mkdir -p "$2/lib/ollama" && cd "$2/lib/ollama" && touch libggml-cuda.so libggml-base.so.0.0.0
ln -s libggml-base.so.0.0.0 libggml-base.so.0""",
}


def test_the_library_is_built_and_an_ollama_installed_as_a_release_is(
    day: Day, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    for name, says in FAKES.items():
        write(tmp_path, f"cuda/bin/{name}")
        (tmp_path / "cuda/bin" / name).write_text(f"#!/bin/sh\n{says}\n")
        (tmp_path / "cuda/bin" / name).chmod(0o755)
    lib64 = ("libcudart.so", "libcudart.so.13", "libcublas.so", "libcublasLt.so")
    write(tmp_path / "cuda/lib64", *lib64)
    write(day.work / "program", "ollama", "libggml-cpu-haswell.so")
    monkeypatch.setenv("PATH", f"{tmp_path}/cuda/bin:/usr/bin:/bin")
    monkeypatch.setattr(machine.shim, "put_beside", lambda folder, *_: write(folder, "shim"))
    day.outcomes["look"] = Outcome(DONE, figures={"gpus": CARDS})
    outcome = machine.library(day)
    assert outcome.lines[0].startswith("libggml-cuda.so for sm_90a-real by CUDA 13")
    said = (tmp_path / "cuda/bin/cmake.said").read_text()
    assert "-DCMAKE_CUDA_ARCHITECTURES=90a-real" in said
    assert "-DGGML_CUDA_NO_VMM=ON" in said  # no libcuda anywhere: the older way to memory
    assert day.program.read_text() == "ollama"
    lib = day.work / "ollama/lib/ollama"
    assert {path.name for path in (lib / "cuda_v13").iterdir()} == {
        *("libggml-cuda.so", "libcudart.so.13", "shim")
    }
    assert (lib / "libggml-base.so.0").is_symlink()
    assert (lib / "libggml-cpu-haswell.so").is_file()


def test_the_drivers_own_library_is_taken_where_the_toolkit_has_no_stub(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    said = Finished(0, "\tlibcuda.so.1 (libc6) => /lib/libcuda.so.1\n", ())
    monkeypatch.setattr(machine, "run", lambda *_: said)
    assert "-DCUDA_cuda_driver_LIBRARY=/lib/libcuda.so.1" in machine.options(tmp_path, "90a-real")
    write(tmp_path, "lib64/stubs/libcuda.so")
    assert "cuda_driver" not in str(machine.options(tmp_path, "90a-real"))
