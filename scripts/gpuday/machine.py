"""Steps of a day with a GPU: what the machine has, and libggml-cuda as it came, with what it needs
of NVIDIA's.
"""

from __future__ import annotations

import json
import shutil
import sys
from dataclasses import replace
from pathlib import Path

from ollama_tiering.bench.machine import begin, this_machine
from ollama_tiering.config import format_size
from ollama_tiering.errors import MissingTool, TieringError
from ollama_tiering.patchset import shim, tools
from ollama_tiering.patchset.run import run
from scripts.gpuday.steps import (
    ABOUT,
    CUDA_LLAMA_CPP,
    CUDA_OLLAMA,
    DONE,
    LACKING,
    PACK,
    PACK_CURE,
    PROGRAM,
    Day,
    Outcome,
)

SMI = "nvidia-smi"
_QUERY = "name,driver_version,memory.total,compute_cap,pcie.link.gen.max"
_TOOLS = ("cmake", "ninja", "make", "c++", "go", "compute-sanitizer", "ncu")
_NVIDIAS = ("libcudart.so.13", "libcublas.so.13", "libcublasLt.so.13")
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
    """What came, with NVIDIA's libraries beside it, and an Ollama that finds it as one of a release
    does. MissingTool without those libraries.
    """
    if day.stand_in:
        return Outcome(DONE, [f"A library that simulates a GPU stands in: `{day.stand_in}`."])
    needed = nvidias()
    came = [name for name in (CUDA_OLLAMA, CUDA_LLAMA_CPP) if (day.work / name).is_dir()]
    for name in came:
        for path in needed:
            link = day.work / name / path.name
            link.unlink(missing_ok=True)
            link.symlink_to(path)
    if CUDA_OLLAMA in came:
        install(day)
    return Outcome(DONE, [f"- {path}" for path in needed])


def nvidias() -> list[Path]:
    """The compiler's own, or those of NVIDIA's wheels."""
    cuda, found = tools.find_cuda(), []
    roots = [*([cuda.nvcc.resolve().parents[1]] if cuda else []), *wheels()]
    for name in _NVIDIAS:
        paths = [path for root in roots for path in _places(root, name)]
        if not paths:
            raise MissingTool(f"no {name} here", hint="install CUDA 13, or NVIDIA's wheels of it")
        found.append(paths[0])
    return found


def _places(root: Path, name: str) -> list[Path]:
    return [path for place in _LIBRARIES if (path := root / place / name).exists()]


def install(day: Day) -> None:
    """The program that came, with GGML's libraries beside it, the shim too."""
    shutil.rmtree(day.work / "ollama", ignore_errors=True)
    libraries, came = day.work / "ollama/lib/ollama", day.work / PROGRAM
    cuda = libraries / "cuda_v13"
    cuda.mkdir(parents=True)
    day.program.parent.mkdir()
    for path in (day.work / CUDA_OLLAMA).iterdir():
        place = libraries if path.name.startswith(shim.BASE) else cuda
        shutil.copy2(path, place / path.name, follow_symlinks=False)
    for path in came.glob("libggml-cpu-*.so"):
        shutil.copy2(path, libraries)
    shutil.copy2(came / "ollama", day.program)
