"""What a machine has, by what its programs say."""

from __future__ import annotations

from pathlib import Path

import pytest

from scripts.gpuday import library, machine
from scripts.gpuday.machine import GpuFacts, Toolkit

SMI = (
    "NVIDIA H100 80GB HBM3, 580.159.04, 81559 MiB, 9.0, 5\nQuadro M6000, 535.1, 12288 MiB, 5.2, 3\n"
)
NVCC = "nvcc: NVIDIA (R) Cuda compiler driver\nCuda compilation tools, release 13.0, V13.0.88\n"


def test_gpus_are_what_the_driver_says() -> None:
    found = machine.gpus(lambda *_: SMI)
    assert found[0] == GpuFacts("NVIDIA H100 80GB HBM3", "580.159.04", 81559, "9.0", "5")
    assert [gpu.arch for gpu in found] == ["90a-real", "52-real"]
    assert machine.gpus(lambda *_: "") == []
    assert machine.gpus(lambda *_: "No devices were found\n") == []


def compiler(folder: Path) -> Path:
    nvcc = folder / "bin/nvcc"
    nvcc.parent.mkdir(parents=True)
    nvcc.touch()
    return nvcc


@pytest.fixture
def no_other_toolkit(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("CUDA_HOME", "CUDA_PATH"):
        monkeypatch.delenv(name, raising=False)


@pytest.mark.usefixtures("no_other_toolkit")
def test_a_compiler_is_found_on_path_and_in_a_wheel(tmp_path: Path) -> None:
    wheel = compiler(tmp_path / "site/nvidia/cu13")
    own = compiler(tmp_path / "cuda")
    both = machine.toolkits([tmp_path / "site"], lambda *_: NVCC, lambda _: str(own))
    assert both[0] == Toolkit(own, tmp_path / "cuda", "13.0")
    assert both[-1] == Toolkit(wheel, tmp_path / "site/nvidia/cu13", "13.0")
    assert both[0].major == 13
    # one that does not run is none
    assert machine.toolkits([tmp_path / "site"], lambda *_: "", lambda _: None) == []


def test_a_program_that_is_not_there_says_nothing() -> None:
    assert machine.ask("no-such-program-at-all") == ""
    assert machine.ask("false") == ""
    assert machine.ask("echo", "yes") == "yes\n"


def test_what_is_there_is_said(tmp_path: Path) -> None:
    facts = machine.look(tmp_path / "work", ask=lambda *_: "")
    lines = machine.words(facts)
    assert facts["gpus"] == []
    assert "- GPUs: none (nvidia-smi does not answer)" in lines
    facts |= {"gpus": [machine.asdict(gpu) for gpu in machine.gpus(lambda *_: SMI)]}
    assert "81559 MiB, CC 9.0, driver 580.159.04, PCIe 5" in machine.words(facts)[1]


def test_wheels_are_put_together_as_a_toolkit(tmp_path: Path) -> None:
    site, folder = tmp_path / "site", tmp_path / "toolkit"
    nvcc = compiler(site / "nvidia/cuda_nvcc")
    runtime = site / "nvidia/cuda_runtime"
    (runtime / "lib").mkdir(parents=True)
    (runtime / "lib/libcudart.so.13").touch()
    (runtime / "include").mkdir()
    (runtime / "include/cuda_runtime.h").touch()
    made = library.whole(Toolkit(nvcc, nvcc.parents[1], "13.0"), [site], folder)
    assert made == Toolkit(folder / "bin/nvcc", folder, "13.0")
    assert (folder / "lib64/libcudart.so").resolve() == runtime / "lib/libcudart.so.13"
    assert (folder / "include/cuda_runtime.h").is_file()
    assert library.whole(made, [site], tmp_path / "other") is made  # whole already


def test_the_older_way_to_memory_is_taken_without_any_libcuda(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    kit = Toolkit(tmp_path / "bin/nvcc", tmp_path, "13.0")
    monkeypatch.setattr(library, "driver_library", lambda: None)
    plain = library.configure(tmp_path, tmp_path / "b", kit, "90a-real", {"ninja"})
    assert "-DGGML_CUDA_NO_VMM=ON" in plain
    assert "-DCMAKE_CUDA_ARCHITECTURES=90a-real" in plain
    assert "Ninja" in plain
    monkeypatch.setattr(library, "driver_library", lambda: Path("/lib/libcuda.so.1"))
    driver = library.configure(tmp_path, tmp_path / "b", kit, "90a-real", {})
    assert "-DCUDA_cuda_driver_LIBRARY=/lib/libcuda.so.1" in driver
    (tmp_path / "lib64/stubs").mkdir(parents=True)
    (tmp_path / "lib64/stubs/libcuda.so").touch()
    stub = library.configure(tmp_path, tmp_path / "b", kit, "90a-real", {})
    assert not any("VMM" in word or "cuda_driver" in word for word in stub)


def test_an_ollama_is_installed_as_a_release_is(tmp_path: Path) -> None:
    built, kit = tmp_path / "built", Toolkit(tmp_path / "bin/nvcc", tmp_path / "kit", "13.0")
    (kit.root / "lib64").mkdir(parents=True)
    (kit.root / "lib64/libcudart.so.13").touch()
    built.mkdir()
    for name in ("libggml-cuda.so", "libggml-base.so.0.0.0"):
        (built / name).write_text(name)
    (built / "libggml-base.so.0").symlink_to("libggml-base.so.0.0.0")
    (tmp_path / "ollama-v1").write_text("program")
    (tmp_path / "build/lib/ollama").mkdir(parents=True)
    (tmp_path / "build/lib/ollama/libggml-cpu-haswell.so").touch()
    program = library.install(tmp_path / "ollama-v1", built, kit, [], tmp_path / "there")
    assert program == tmp_path / "there/bin/ollama"
    lib = tmp_path / "there/lib/ollama"
    assert (lib / "libggml-base.so.0").read_text() == "libggml-base.so.0.0.0"
    assert (lib / "libggml-cpu-haswell.so").is_file()
    assert (lib / "cuda_v13/libggml-cuda.so").read_text() == "libggml-cuda.so"
    assert (lib / "cuda_v13/libcudart.so.13").resolve() == kit.root / "lib64/libcudart.so.13"
