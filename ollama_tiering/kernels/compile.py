"""Makes libpaged_attn.so out of csrc with nothing but a C++ compiler. Standard library only and no
import of this package, because the wheel's build hook (hatch_build.py) loads this file alone; so
it also runs the compiler itself.
"""

from __future__ import annotations

import hashlib
import os
import platform
import shlex
import shutil
import subprocess
import sys
import tempfile
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

LIBRARY = "libpaged_attn.so"
SOURCES = "sources.txt"
FLAGS = (
    "-std=c++17",
    "-O3",
    "-ffp-contract=off",
    "-fPIC",
    "-fvisibility=hidden",
    "-pthread",
    "-Iinclude",
    "-I.",
)
COMPILERS = ("c++", "g++", "clang++")
MACHINES = {"amd64": "x86_64", "arm64": "aarch64"}  # other names of the same
MAX_JOBS = 4


class CompileFailed(Exception):
    """The compiler's answer: what was run, and its first error."""


@dataclass(frozen=True, slots=True)
class Source:
    path: str  # below csrc
    flags: tuple[str, ...]


def find_compiler() -> str | None:
    """$CXX, else the first of `COMPILERS` on PATH."""
    named = os.environ.get("CXX")
    for name in (named,) if named else COMPILERS:
        if found := shutil.which(name):
            return found
    return None


def machine_of(compiler: str) -> str:
    """The machine that it compiles for, which is another one if it is a cross compiler, or if the
    system's programs have 32 bits on a kernel of 64; this one where it does not say.
    """
    done = subprocess.run([compiler, "-dumpmachine"], capture_output=True, check=False)
    said = "" if done.returncode else done.stdout.decode(errors="replace").partition("-")[0].strip()
    machine = (said or platform.machine()).lower()
    return MACHINES.get(machine, machine)


def sources(csrc: Path, machine: str) -> list[Source]:
    """The files that make up the library on a machine, in link order."""
    machine = MACHINES.get(machine.lower(), machine.lower())
    chosen = []
    for line in (csrc / SOURCES).read_text(encoding="utf-8").splitlines():
        if line.strip() and not line.startswith("#"):
            path, wanted, *flags = line.split()
            if wanted in ("any", machine):
                chosen.append(Source(path, tuple(flags)))
    return chosen


def fingerprint(csrc: Path, compiler: str) -> str:
    """Changes whenever compiling would give another library."""
    machine = machine_of(compiler)
    state = hashlib.sha256(machine.encode())
    version = subprocess.run([compiler, "--version"], capture_output=True, check=False).stdout
    for part in (compiler.encode(), version, " ".join(FLAGS).encode()):
        state.update(len(part).to_bytes(8, "little") + part)
    listed = {source.path for source in sources(csrc, machine)} | {SOURCES}
    headers = {str(path.relative_to(csrc)) for path in csrc.rglob("*.h")}
    for name in sorted(listed | headers):
        content = (csrc / name).read_bytes()
        state.update(f"{name}\0{len(content)}\0".encode() + content)
    return state.hexdigest()


def compile_library(csrc: Path, compiler: str, target: Path) -> None:
    """Write the library to `target`, whole or not at all. CompileFailed says what went wrong."""
    target.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=target.parent, prefix=".compile-") as work:
        objects = [
            (source, Path(work, source.path.replace("/", "-") + ".o"))
            for source in sources(csrc, machine_of(compiler))
        ]
        with ThreadPoolExecutor(min(MAX_JOBS, os.cpu_count() or 1)) as pool:
            for job in [
                pool.submit(
                    _run, csrc, compiler, *FLAGS, *source.flags, "-c", source.path, "-o", str(made)
                )
                for source, made in objects
            ]:
                job.result()
        linked = Path(work, LIBRARY)
        objects_in_order = [str(made) for _, made in objects]
        # libdl: a glibc before 2.34 has dlopen there
        libraries = ["-ldl"] if sys.platform == "linux" else []
        _run(
            csrc, compiler, "-shared", "-pthread", "-o", str(linked), *objects_in_order, *libraries
        )
        linked.replace(target)


def _run(cwd: Path, *command: str) -> None:
    done = subprocess.run(command, cwd=cwd, capture_output=True, check=False)
    if done.returncode:
        lines = done.stderr.decode(errors="replace").splitlines()
        first = next((line for line in lines if "error" in line), lines[-1] if lines else "")
        raise CompileFailed(f"{shlex.join(command)}: exit code {done.returncode}: {first.strip()}")
