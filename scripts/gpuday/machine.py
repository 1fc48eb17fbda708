"""Steps of a day with a GPU: what the machine has, and libggml-cuda for its GPU, with the shim
(csrc/shim) beside it.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

from ollama_tiering.bench.machine import begin, this_machine
from ollama_tiering.config import MIB, format_size
from ollama_tiering.errors import MissingTool, TieringError
from ollama_tiering.patchset import shim, tools
from ollama_tiering.patchset.report import Report
from ollama_tiering.patchset.run import run
from scripts.gpuday.steps import (
    ABOUT,
    DONE,
    GGML,
    LACKING,
    PACK,
    PACK_CURE,
    PROGRAM,
    ROOT,
    Day,
    Outcome,
)

SMI = "nvidia-smi"
_QUERY = "name,driver_version,memory.total,compute_cap,pcie.link.gen.max"
_TOOLS = ("cmake", "ninja", "make", "c++", "go", "compute-sanitizer", "ncu")
_NVIDIAS = ("libcudart.so", "libcublas.so", "libcublasLt.so")
_LIBRARIES = ("lib", "targets/x86_64-linux/lib", "lib64")  # of a toolkit or a wheel


def look(day: Day) -> Outcome:
    """What is there, and the head of the report."""
    cards, cuda, about = gpus(), tools.find_cuda(), day.work / ABOUT
    packed = json.loads(about.read_text(encoding="utf-8")) if about.exists() else {}
    machine = this_machine(begin())
    if packed:
        machine = replace(machine, code=packed["commit"])  # a checkout that travels has no git
    head = [*machine.lines(), *(f"- GPU: {card} ({_QUERY})" for card in cards)]
    head.append("- Command: `scripts/gpu_day run`")
    nvcc = f"{cuda.nvcc}, {run(cuda.nvcc, '--version').tail[-1]}" if cuda else "none"
    found = [f"{name} ({path})" for name in _TOOLS if (path := shutil.which(name))]
    disk = format_size(shutil.disk_usage(day.work).free)
    lines = [
        f"- {disk} of disk, Python {sys.version.split()[0]} ({sys.executable})",
        f"- CUDA compiler: {nvcc}",
        f"- NVIDIA's wheels: {', '.join(sorted({path.name for path in wheels()})) or 'none'}",
        f"- Tools: {', '.join(found) or 'none'}",
    ]
    if packed:
        lines.append(f"- Pack: {', '.join(f'{name} {said}' for name, said in packed.items())}")
    outcome = Outcome(DONE, lines, {"head": head, "gpus": cards})
    if not day.stand_in and not cards:
        outcome.status, outcome.why = LACKING, f"no GPU: {SMI} does not answer"
        outcome.cure = "a machine with an NVIDIA GPU and its driver"
    elif not day.stand_in and not packed:
        outcome.status, outcome.why, outcome.cure = LACKING, f"no {PACK}", PACK_CURE
    return outcome


def gpus() -> list[str]:
    """What the driver's own program says of each: a line."""
    try:
        said = run(SMI, f"--query-gpu={_QUERY}", "--format=csv,noheader", seconds=60).stdout
    except TieringError:  # it is not there, or hangs
        return []
    return [line for line in said.splitlines() if line.count(",") == _QUERY.count(",")]


def wheels() -> list[Path]:
    """Folders of NVIDIA's wheels, which this Python has."""
    return [path for place in sys.path for path in sorted(Path(place).glob("nvidia/[!_]*"))]


def library(day: Day) -> Outcome:
    """An Ollama that finds the library, as one of a release does."""
    if day.stand_in:
        return Outcome(DONE, [f"A library that simulates a GPU stands in: `{day.stand_in}`."])
    cuda = tools.find_cuda()
    if cuda is None:
        raise MissingTool("no CUDA compiler (nvcc) on PATH or in CUDA_HOME", hint="install CUDA")
    source, build = day.work / GGML, day.work / "ggml-build"
    root = toolkit(cuda.nvcc, day.work / "toolkit")
    arch = architecture(day.figures("look")["gpus"][0])
    cmake, jobs = tools.find_cmake(Report()), str(os.cpu_count())
    _run(cmake, "-S", source, "-B", build, *options(root, arch))
    _run(cmake, "--build", build, "--target", "ggml-cuda", "--parallel", jobs)
    built = build / "lib/ollama"
    install(day, built, root, cuda.major)
    size = (built / shim.STOCK).stat().st_size / MIB
    line = f"{shim.STOCK} for sm_{arch} by CUDA {cuda.major}, {size:.1f} MiB, {jobs} jobs"
    return Outcome(DONE, [f"{line}; the shim beside it."])


def _run(*command: str | Path) -> None:
    """Into the step's log as it goes."""
    print("+", *command, flush=True)
    subprocess.run(command, check=True, stdin=subprocess.DEVNULL)


def architecture(card: str) -> str:
    """As CMake writes it, machine code alone; upstream builds 90a for Hopper."""
    number = card.split(", ")[3].replace(".", "")
    return f"{number}a-real" if number == "90" else f"{number}-real"


def toolkit(nvcc: Path, folder: Path) -> Path:
    """The compiler's own, if CMake finds all in it. Often cuBLAS did not come with it: then one is
    put together in `folder`, with NVIDIA's wheels and the names that linkers look for.
    """
    root = nvcc.resolve().parents[1]
    if all(_places(root, name) for name in _NVIDIAS):
        return root
    shutil.rmtree(folder, ignore_errors=True)
    (folder / "lib").mkdir(parents=True)
    (folder / "lib64").symlink_to("lib")
    useful = [path for path in wheels() if any(_places(path, f"{name}.*") for name in _NVIDIAS)]
    for package in (*useful, root):  # what is twice: of the compiler's own
        for name in ("bin", "nvvm", "include"):
            if (package / name).is_dir():
                shutil.copytree(package / name, folder / name, dirs_exist_ok=True)
        for path in _places(package, "lib*"):
            for name in (path.name, re.sub(r"\.so\..*", ".so", path.name)):
                (folder / "lib" / name).unlink(missing_ok=True)
                (folder / "lib" / name).symlink_to(path)
    return folder


def _places(root: Path, pattern: str) -> list[Path]:
    return [path for name in _LIBRARIES for path in sorted((root / name).glob(pattern))]


def options(root: Path, arch: str) -> list[str]:
    """CMake's. The driver's own library stands in where the toolkit has no stub of it, and without
    either memory is taken the older way.
    """
    words = ["-G", "Ninja"] if shutil.which("ninja") else []
    words += ["-DCMAKE_BUILD_TYPE=Release", "-DGGML_CCACHE=OFF"]
    words += [f"-DCMAKE_CUDA_COMPILER={root}/bin/nvcc", f"-DCUDAToolkit_ROOT={root}"]
    words += [f"-DCMAKE_CUDA_ARCHITECTURES={arch}", "-DCMAKE_HIP_COMPILER=NOTFOUND"]
    words += ["-DCMAKE_DISABLE_FIND_PACKAGE_Vulkan=ON"]
    if not _places(root, "stubs/libcuda.so"):
        driver = re.search(r"libcuda\.so\.1 .*=> (\S+)", run("ldconfig", "-p").stdout)
        words += [f"-DCUDA_cuda_driver_LIBRARY={driver[1]}" if driver else "-DGGML_CUDA_NO_VMM=ON"]
    return words


def install(day: Day, built: Path, root: Path, major: int) -> None:
    """The program that came, with GGML's libraries beside it and links to NVIDIA's."""
    shutil.rmtree(day.work / "ollama", ignore_errors=True)
    libraries = day.work / "ollama/lib/ollama"
    cuda = libraries / f"cuda_v{major}"
    cuda.mkdir(parents=True)
    day.program.parent.mkdir()
    came = day.work / PROGRAM
    for path in (*built.glob("libggml-base.so*"), *came.glob("libggml-cpu-*.so")):
        shutil.copy2(path, libraries, follow_symlinks=False)
    shutil.copy2(built / shim.STOCK, cuda)
    for name in _NVIDIAS:
        for path in _places(root, f"{name}.{major}")[:1]:
            (cuda / path.name).symlink_to(path)
    shutil.copy2(came / "ollama", day.program)
    shim.put_beside(cuda, ROOT / "csrc/shim", day.work / GGML, Report())
