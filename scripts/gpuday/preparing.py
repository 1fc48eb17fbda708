"""Steps of a day with a GPU that make what the others need: what is there, the pack, libggml-cuda
for the GPU, and a model.
"""

from __future__ import annotations

import os
import shutil
import subprocess
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from scripts.gpuday import library, machine, pack
from scripts.gpuday.day import PACK_CURE, ROOT, Day
from scripts.gpuday.machine import GpuFacts, Toolkit
from scripts.gpuday.steps import DONE, FAILED, LACKING, Outcome

NO_GPU = f"no GPU: {machine.SMI} does not answer"
NO_GPU_CURE = "a machine with an NVIDIA GPU and its driver"
NO_TOOLKIT = "no CUDA compiler (nvcc) on PATH, in CUDA_HOME, or in a wheel below site-packages"

Figures = Mapping[str, Mapping[str, Any]]  # of the steps that are done


def look(day: Day, _figures: Figures) -> Outcome:
    facts = machine.look(day.work)
    return Outcome(DONE, machine.words(facts), facts)


def gpu(day: Day, figures: Figures) -> Outcome:
    if day.stand_in:
        return Outcome(DONE, [f"A library that simulates one stands in: `{day.program}`."])
    found = figures["look"]["gpus"]
    if not found:
        return Outcome(LACKING, why=NO_GPU, cure=NO_GPU_CURE)
    return Outcome(DONE, [f"{one['name']}, CC {one['compute']}" for one in found])


def unpack(day: Day, _figures: Figures) -> Outcome:
    """A machine whose Python has all, and a program that was given, need no pack."""
    about = pack.read_about(day.pack)
    if not about:
        if day.program is None:
            return Outcome(LACKING, why=f"no pack in {day.pack}", cure=PACK_CURE)
        lines = ["There is no pack, and none is needed: a program was given."]
    else:
        program = pack.unpack(day.pack, day.work)
        lines = [f"{about['build']}: {program.name}, SHA-256 {about['sha256']}"]
        if absent := set(about["processor"].split()) - pack.processor_flags():
            lines.append(
                f"It was built for a processor with {', '.join(sorted(absent))}, which this one "
                "has not: it may not run. `tiering patch --cpu variants` builds for all."
            )
    (day.work / "unpacked").touch()
    return Outcome(DONE, lines)


def make_library(day: Day, figures: Figures) -> Outcome:
    if day.program:
        return Outcome(DONE, [f"A program was given: `{day.program}`."])
    look = figures["look"]
    gpu = GpuFacts(**look["gpus"][0])
    kits = [
        Toolkit(Path(one["nvcc"]), Path(one["root"]), one["version"]) for one in look["toolkits"]
    ]
    if not kits:
        return Outcome(LACKING, why=NO_TOOLKIT, cure="install a CUDA toolkit, or give --program")
    for tool in ("cmake", "c++"):
        if tool not in look["tools"]:
            return Outcome(LACKING, why=f"no {tool}", cure=f"install {tool}, or give --program")
    sites, source = machine.site_folders(), day.work / "ggml"
    kit, jobs = library.whole(kits[0], sites, day.work / "toolkit"), os.cpu_count() or 1
    try:
        built = library.build(source, day.work / "ggml-build", kit, gpu.arch, look["tools"], jobs)
    except subprocess.CalledProcessError as error:
        return Outcome(FAILED, why=f"{error.cmd[0]} ended with {error.returncode}: read the log")
    program = day.work / "program" / str(pack.read_about(day.pack)["program"])
    installed = library.install(program, built, kit, sites, day.work / "ollama")
    shims = library.put_shim(installed, ROOT / "csrc/shim", source)
    size = (built / library.STOCK).stat().st_size / pack.MIB
    lines = [
        f"{library.STOCK} for sm_{gpu.arch} by CUDA {kit.version}, {size:.1f} MiB, {jobs} jobs; "
        f"{len(shims)} shim beside it."
    ]
    return Outcome(DONE, lines)


def model(day: Day, _figures: Figures) -> Outcome:
    from ollama_tiering.models.make import make_model
    from scripts.gpuday import asking

    sizes = asking.small() if day.small else asking.real()
    shutil.rmtree(day.work / "models", ignore_errors=True)  # of another one
    stored = make_model(sizes.shape, day.work / "model.gguf", seed=1)
    return Outcome(DONE, [f"{sizes.shape.words}; {stored / pack.MIB:,.0f} MiB"])


def csrc(day: Day, _figures: Figures) -> Outcome:
    """The library of csrc, and NVRTC, which compiles its kernels when they are used."""
    if day.stand_in:
        return Outcome(
            LACKING, why="no GPU: what stands in has no driver, and no kernel runs on it"
        )
    from ollama_tiering.errors import MissingTool
    from ollama_tiering.kernels import library_path, nvrtc

    try:
        version = ".".join(map(str, nvrtc.compiler().version))
        path = library_path()
    except MissingTool as missing:
        return Outcome(LACKING, why=missing.message, cure=missing.hint or "")
    (day.work / "compiled").touch()
    return Outcome(DONE, [f"`{path}`; NVRTC {version}"])


STEPS: dict[str, Callable[[Day, Figures], Outcome]] = {
    "look": look,
    "gpu": gpu,
    "unpack": unpack,
    "library": make_library,
    "model": model,
    "csrc": csrc,
}
