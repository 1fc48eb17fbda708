"""What travels to a machine with a GPU, and what is made of it there."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

import pytest

from ollama_tiering import config
from ollama_tiering.errors import MissingTool
from ollama_tiering.patchset import binary, finished
from ollama_tiering.patchset.run import Finished
from ollama_tiering.patchset.tools import Cuda
from scripts.gpuday import command, compile, machine, pack, steps
from scripts.gpuday.steps import DONE, LACKING, PACK_CURE, Day

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
    """Its pack is made of what lies in the product's cache: finished builds, and libggml-cuda."""
    write(tmp_path, f"{BUILD}/ollama")
    write(tmp_path / "trees/v0.16.3-native/src", "CMakeLists.txt", "main.go")
    write(tmp_path / "servers", "build/bin/llama-server", "stock/llama-server", "source/README")
    write(tmp_path / "cuda", "libggml-cuda.so", "libggml-base.so.0.0.0")
    (tmp_path / "cuda/libggml-base.so.0").symlink_to("libggml-base.so.0.0.0")
    monkeypatch.setattr(binary, "ready_binary", lambda: tmp_path / BUILD / "ollama")
    monkeypatch.setattr(finished, "folder_of", lambda program: program.parent)
    monkeypatch.setattr(config, "cache_dir", lambda: tmp_path)
    monkeypatch.setattr(pack, "install", lambda site: write(site, "thing/__init__.py"))
    monkeypatch.setattr(pack.llama_server, "DEFAULT", tmp_path / "servers")
    for name in ("of_ollama", "of_llama_cpp"):
        monkeypatch.setattr(pack, name, lambda *_: tmp_path / "cuda")
    monkeypatch.setattr(pack.shim, "put_beside", lambda folder, *_: write(folder, "shim"))
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
    libraries = ("libggml-cuda.so", "libggml-base.so.0", "libggml-base.so.0.0.0")
    packed = {
        *("pack.json", "site/thing/__init__.py", "program/ollama", "cuda/ollama/shim"),
        *("llama-server/build/bin/llama-server", "llama-server/stock/llama-server"),
        *(f"cuda/{engine}/{name}" for engine in ("ollama", "llama.cpp") for name in libraries),
    }
    assert unpack(day, monkeypatch) == packed
    assert (day.work / "program/ollama").read_text() == f"{BUILD}/ollama"
    assert any("for processors like" in line for line in machine.look(day).lines)


@pytest.mark.parametrize(
    ("engine", "left_out"),
    [
        ("ollama", ["cuda/llama.cpp/", "llama-server/"]),
        ("llama-server", ["cuda/ollama/", "program/"]),
        ("none", ["cuda/", "llama-server/", "program/"]),
    ],
)
def test_for_one_engine_or_none_less_travels(
    day: Day, monkeypatch: pytest.MonkeyPatch, engine: str, left_out: list[str]
) -> None:
    whole = unpack(day, monkeypatch)
    shutil.rmtree(day.work)
    assert command.main(["pack", "--engine", engine]) == 0
    command.run(day, 1)
    files = {str(path.relative_to(day.work)) for path in day.work.rglob("*") if path.is_file()}
    assert whole - files == {name for name in whole if name.startswith(tuple(left_out))} != set()
    monkeypatch.setattr(machine, "nvidias", list)
    assert machine.library(day).status == DONE
    assert day.program.exists() == (engine == "ollama")


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


NVIDIAS = ("libcudart.so.13", "libcublas.so.13", "libcublasLt.so.13")


def test_nvidias_libraries_are_the_compilers_own_or_those_of_wheels(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    cuda, site = tmp_path / "toolkit", tmp_path / "site"
    monkeypatch.setattr(machine.sys, "path", [str(site)])
    monkeypatch.setattr(machine.tools, "find_cuda", lambda: None)
    with pytest.raises(MissingTool, match=r"no libcudart\.so\.13"):
        machine.nvidias()
    write(site / "nvidia/cu13/lib", *NVIDIAS)
    write(site / "nvidia/cudnn/lib", "libcudnn.so.9")
    assert machine.nvidias() == [site / "nvidia/cu13/lib" / name for name in NVIDIAS]
    write(cuda, "bin/nvcc", "lib64/libcudart.so.13")
    monkeypatch.setattr(machine.tools, "find_cuda", lambda: Cuda(cuda / "bin/nvcc", 13))
    assert machine.nvidias()[:2] == [
        *(cuda / "lib64/libcudart.so.13", site / "nvidia/cu13/lib/libcublas.so.13")
    ]


def test_an_ollama_is_installed_as_a_release_is(
    day: Day, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    write(tmp_path / BUILD / "build/lib/ollama", "libggml-cpu-haswell.so")
    unpack(day, monkeypatch)
    write(tmp_path / "nvidia", *NVIDIAS)
    found = [tmp_path / "nvidia" / name for name in NVIDIAS]
    monkeypatch.setattr(machine, "nvidias", lambda: found)
    assert machine.library(day).lines == [f"- {path}" for path in found]
    assert day.program.read_text() == f"{BUILD}/ollama"
    lib = day.work / "ollama/lib/ollama"
    assert {path.name for path in (lib / "cuda_v13").iterdir()} == {
        *("libggml-cuda.so", "shim", *NVIDIAS)
    }
    assert (lib / "libggml-base.so.0").is_symlink()
    assert (lib / "libggml-cpu-haswell.so").is_file()
    assert (day.work / "cuda/llama.cpp/libcublas.so.13").read_text() == "libcublas.so.13"


def test_a_toolkit_is_made_of_wheels_with_a_stub_of_the_driver(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def install(*words: object, **_: object) -> Finished:
        site = Path(str(words[words.index("--target") + 1]))
        write(site / "nvidia/cu13", "bin/nvcc", "lib/libcublas.so.13", "include/cublas_v2.h")
        return Finished(0, "", ())

    monkeypatch.setattr(config, "cache_dir", lambda: tmp_path)
    monkeypatch.setattr(compile, "run", install)
    source = tmp_path / "source/common.cuh"
    source.parent.mkdir()
    source.write_text("CU_CHECK(cuMemCreate(&handle, size)); cudaMalloc(&p); cuGetErrorString(e);")
    for _ in range(2):  # the second finds it
        root = compile.toolkit(source.parent)
    assert (root / "lib64/libcublas.so").read_text() == "lib/libcublas.so.13"
    said = subprocess.run(["nm", "-D", root / "lib/stubs/libcuda.so"], capture_output=True)
    functions = {line.split()[-1] for line in said.stdout.decode().splitlines() if " T " in line}
    assert functions == {"cuMemCreate", "cuGetErrorString"}


def test_what_was_compiled_is_found_again_until_its_sources_change(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    compiled: list[Path] = []

    def fake(source: Path, build: Path, _: object) -> list[Path]:
        compiled.append(source)
        write(build, "libggml-cuda.so", "libggml-base.so.0")
        return [build / "libggml-cuda.so", build / "libggml-base.so.0"]

    monkeypatch.setattr(config, "cache_dir", lambda: tmp_path)
    monkeypatch.setattr(compile, "_compiled", fake)
    source = tmp_path / "source"
    write(source, "CMakeLists.txt", "ggml/a.cu")
    first = compile.built("x", source, Path("ggml"))
    assert {path.name for path in first.iterdir()} == {"libggml-cuda.so", "libggml-base.so.0"}
    write(source, "CMakeLists.txt", "ggml/src/ggml-cpu/ours.cpp")  # neither is compiled for it
    assert compile.built("x", source, Path("ggml")) == first
    (source / "ggml/a.cu").write_text("other")
    assert compile.built("x", source, Path("ggml")) != first
    assert len(compiled) == 2
