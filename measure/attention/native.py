"""The benchmarks' own C++ (csrc/bench), compiled into the cache when it is first needed."""

from __future__ import annotations

import hashlib
import os
import tempfile
from pathlib import Path

from ollama_tiering import config
from ollama_tiering.errors import BuildError, MissingTool
from ollama_tiering.kernels import compile as compiling
from ollama_tiering.kernels.library import csrc_dir
from ollama_tiering.patchset import tools
from ollama_tiering.patchset.lock import locked
from ollama_tiering.patchset.report import Report
from ollama_tiering.patchset.run import Finished, run
from ollama_tiering.patchset.upstream import SourceCache

PEAKS = "machine_peaks"
GGML = "ggml-attention"
_FLAGS = ("-std=c++17", "-O3", "-fPIC", "-shared", "-pthread", "-Wall", "-Wextra", "-Wshadow")
_SHOWN_LINES = 6


def peaks_library(report: Report) -> Path:
    """csrc/bench/machine_peaks.cpp as a shared library. MissingTool, BuildError."""
    source = csrc_dir() / "bench" / f"{PEAKS}.cpp"
    compiler = _compiler()
    made = _folder(PEAKS, [compiler, *_FLAGS, _version(compiler), source.read_text()])
    library = made / f"lib{PEAKS}.so"
    with locked(made.with_suffix(".lock"), f"another process compiles {PEAKS}", report):
        if not library.is_file():
            with tempfile.TemporaryDirectory(dir=made.parent) as scratch:
                target = Path(scratch) / library.name
                _require(run(compiler, *_FLAGS, "-o", target, source), PEAKS)
                made.mkdir(exist_ok=True)
                target.replace(library)
    return library


def ggml_program(cache: SourceCache, tag: str, isa: str, report: Report) -> Path:
    """ggml of `tag`, unpatched, with csrc/bench/ggml around it; `isa`: native or avx2.

    The tag must be in the source cache. MissingTool, BuildError.
    """
    sources = csrc_dir() / "bench" / "ggml"
    texts = [path.read_text() for path in sorted(sources.iterdir())]
    compiler = _compiler()
    made = _folder(f"{GGML}-{tag}-{isa}", [cache.commit(tag), compiler, _version(compiler), *texts])
    program = made / GGML
    with locked(made.with_suffix(".lock"), f"another process builds {GGML}", report):
        if not program.is_file():
            with (
                tempfile.TemporaryDirectory(dir=made.parent) as scratch,
                report.stage(f"building ggml of {tag} to compare with ({isa})"),
            ):
                built = _build_ggml(cache, tag, isa, sources, compiler, Path(scratch), report)
                made.mkdir(exist_ok=True)
                built.replace(program)
    return program


def _build_ggml(
    cache: SourceCache,
    tag: str,
    isa: str,
    sources: Path,
    compiler: str,
    scratch: Path,
    report: Report,
) -> Path:
    cmake = tools.find_cmake(report)
    tools.require_compiler()
    tools.require_make()
    cache.extract(tag, scratch / "src")
    build = scratch / "build"
    ggml = scratch / "src" / "ml" / "backend" / "ggml" / "ggml"
    settings = (f"-DGGML_DIR={ggml}", f"-DISA={isa}", f"-DCMAKE_CXX_COMPILER={compiler}")
    _require(run(cmake, "-S", sources, "-B", build, *settings, report=report), GGML)
    jobs = str(os.cpu_count() or 1)
    _require(run(cmake, "--build", build, "--parallel", jobs, report=report), GGML)
    return build / GGML


def _compiler() -> str:
    found = compiling.find_compiler()
    if found is None:
        raise MissingTool(
            "no C++ compiler on PATH, which the measurements need",
            hint="install one (Debian, Ubuntu: apt-get install g++) or set CXX",
        )
    return found


def _version(compiler: str) -> str:
    return run(compiler, "--version").stdout


def _folder(name: str, decisive: list[str]) -> Path:
    """The folder for the result of exactly these inputs."""
    state = hashlib.sha256()
    for part in decisive:
        state.update(len(part.encode()).to_bytes(8, "little") + part.encode())
    folder = config.cache_dir() / "bench" / f"{name}-{state.hexdigest()[:16]}"
    folder.parent.mkdir(parents=True, exist_ok=True)
    return folder


def _require(done: Finished, what: str) -> None:
    if done.returncode:
        errors = [line for line in done.tail if "error" in line.lower()] or list(done.tail)
        shown = "\n".join(f"  {line}" for line in errors[:_SHOWN_LINES])
        raise BuildError(f"building {what} failed with exit code {done.returncode}\n{shown}")
