"""libggml-cuda for one kind of GPU, compiled here: a card is lent for minutes, and this takes an
hour on 2 cores. The compiler is NVIDIA's own, from PyPI; no driver is needed. What was compiled is
kept in the product's cache, by the digest of its sources.
"""

from __future__ import annotations

import hashlib
import os
import re
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterable
from pathlib import Path

from ollama_tiering import config
from ollama_tiering.errors import BuildError
from ollama_tiering.patchset import tools
from ollama_tiering.patchset.pip import pip
from ollama_tiering.patchset.report import Report
from ollama_tiering.patchset.run import run
from ollama_tiering.patchset.shim import BASE, STOCK

ARCH = "90a-real"  # as CMake writes it: machine code alone; upstream builds 90a for Hopper
MAJOR = 13  # of CUDA
WHEELS = (
    *("nvidia-cuda-nvcc==13.0.88", "nvidia-cuda-crt==13.0.88", "nvidia-nvvm==13.0.88"),
    *("nvidia-cuda-runtime==13.0.96", "nvidia-cuda-cccl==13.0.85", "nvidia-cublas==13.10.0.20"),
)
OPTIONS = (
    *("-DCMAKE_BUILD_TYPE=Release", "-DGGML_CCACHE=OFF", f"-DCMAKE_CUDA_ARCHITECTURES={ARCH}"),
    *("-DCMAKE_HIP_COMPILER=NOTFOUND", "-DCMAKE_DISABLE_FIND_PACKAGE_Vulkan=ON"),
)
LLAMA_CPP = (  # its GGML alone; Ollama's own CMake says the same for its own
    *("-DGGML_CUDA=ON", "-DGGML_BACKEND_DL=ON", "-DGGML_CPU=OFF", "-DGGML_NATIVE=OFF"),
    *("-DBUILD_SHARED_LIBS=ON", "-DGGML_CUDA_FA=ON", "-DGGML_CUDA_GRAPHS=ON"),
    *("-DGGML_BUILD_TESTS=OFF", "-DGGML_BUILD_EXAMPLES=OFF", "-DGGML_OPENMP=OFF"),
)
_OTHERS = {"ggml-cpu", "ggml-vulkan", "ggml-metal", "ggml-hip"}  # backends: ours is among them
_DRIVERS = re.compile(r"\b(cu(?:Mem|Device|Get)[A-Z]\w*)(?=\()")


def folder() -> Path:
    return config.cache_dir() / "gpu_day"


def built(name: str, source: Path, part: Path, options: Iterable[str] = ()) -> Path:
    """The folder of `source`'s libggml-cuda.so and the libggml-base that it was linked with; `part`
    of the source is what is compiled.
    """
    words = [*OPTIONS, *options]
    target = folder() / name / _digest(source / part, words)
    if not target.is_dir():
        target.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=folder()) as scratch:
            fresh = Path(scratch, "libraries")
            fresh.mkdir()
            for library in _compiled(source, Path(scratch, "build"), words):
                shutil.copy2(library, fresh, follow_symlinks=False)
            fresh.rename(target)
    return target


def _digest(sources: Path, words: Iterable[str]) -> str:
    found = hashlib.sha256("\0".join([*WHEELS, *words]).encode())
    for path in sorted(sources.rglob("*")):
        if path.is_file() and not _OTHERS.intersection(path.parts):
            found.update(f"{path.relative_to(sources)}\0".encode() + path.read_bytes() + b"\0")
    return found.hexdigest()[:16]


def _compiled(source: Path, build: Path, words: Iterable[str]) -> Iterable[Path]:
    root = toolkit(source)
    named = [f"-DCMAKE_CUDA_COMPILER={root}/bin/nvcc", f"-DCUDAToolkit_ROOT={root}"]
    generator = ["-G", "Ninja"] if shutil.which("ninja") else []
    cmake = tools.find_cmake(Report())
    jobs = str(len(os.sched_getaffinity(0)))
    make: list[str | Path] = ["-S", source, "-B", build, *generator, *words, *named]
    for options in (make, ["--build", build, "--target", "ggml-cuda", "--parallel", jobs]):
        subprocess.run([cmake, *options], check=True, stdin=subprocess.DEVNULL, stdout=sys.stderr)
    return (next(build.rglob(STOCK)), *build.rglob(f"{BASE}*"))


def toolkit(source: Path) -> Path:
    """NVIDIA's wheels as CMake looks for a toolkit: with the names that linkers want, and a stub of
    the driver's library that has the functions which `source` calls.
    """
    place = folder() / "toolkit" / hashlib.sha256("\0".join(WHEELS).encode()).hexdigest()[:16]
    root = place / f"nvidia/cu{MAJOR}"
    if not place.is_dir():
        with pip() as (command, needs), tempfile.TemporaryDirectory(dir=_made(folder())) as name:
            fresh = Path(name, "site")
            install = ("install", "--quiet", "--disable-pip-version-check", "--no-deps")
            done = run(*command, *install, "--target", fresh, *WHEELS, env=needs)
            if done.returncode:
                raise BuildError("pip:\n" + "\n".join(done.tail))
            _made(place.parent)
            fresh.rename(place)
        for library in list((root / "lib").glob("lib*.so.*")):
            link = library.with_name(re.sub(r"\.so\..*", ".so", library.name))
            link.symlink_to(library.name)
        (root / "lib64").symlink_to("lib")
    stub = _made(root / "lib/stubs") / "libcuda.so"
    called = {name for path in source.rglob("*.cu*") for name in _DRIVERS.findall(_text(path))}
    code = "".join(f"int {name}(void) {{ return 100; }}\n" for name in sorted(called))
    asked = ("-shared", "-fPIC", "-Wl,-soname,libcuda.so.1", "-x", "c", "-", "-o", str(stub))
    subprocess.run([*tools.cxx_compiler(), *asked], input=code.encode(), check=True)
    return root


def _made(path: Path) -> Path:
    path.mkdir(parents=True, exist_ok=True)
    return path


def _text(path: Path) -> str:
    return path.read_text(encoding="utf-8", errors="replace")
