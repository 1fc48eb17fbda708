"""What a binary was built from, as one short name that is linked into it.

K/V computed by other code differs in its last bits, so the runner puts this name into the namespace
of everything it stores (docs/format.md, "Namespace"). It covers what decides the machine code of
the arithmetic: upstream's tree, hooks, overlay and kernels, the compilers with everything they
predefine for the given flags (version, instruction set, tuning of `-march=native`), Go, and the
kind of build. What only stores and restores is left out (stored_rows.py).
"""

from __future__ import annotations

import hashlib
import json
import mmap
import os
import re
import shlex
from collections.abc import Iterator
from pathlib import Path

from ollama_tiering import config
from ollama_tiering.errors import BuildError
from ollama_tiering.patchset.compilers import COMPILERS, command_of
from ollama_tiering.patchset.manifest import Patchset
from ollama_tiering.patchset.run import run
from ollama_tiering.patchset.tools import Cuda

DIGITS = 16  # hex; 64 bits tell the builds of one household apart
PLACEHOLDER = "{build}"  # in [go.ldflags] of upstream.toml
MARK = b"kvtier-build:"  # before it there, so that it is found in a binary

FLAG_VARIABLES = (  # of the environment: what Go, CMake and the compilers read from it
    *("CC", "CXX", "CFLAGS", "CXXFLAGS", "CPPFLAGS", "LDFLAGS"),
    *("CGO_CFLAGS", "CGO_CXXFLAGS", "CGO_CPPFLAGS", "CGO_LDFLAGS"),
    *("GOFLAGS", "GOAMD64", "GOARM64"),
    *("CUDAFLAGS", "NVCC_PREPEND_FLAGS", "NVCC_APPEND_FLAGS"),
)


def build_id(
    patchset: Patchset,
    *,
    tag: str,
    tree: str,
    kind: str,
    go_tags: tuple[str, ...],
    go: tuple[int, ...],
    flags: dict[str, str],
    cuda: Cuda | None,
    cuda_arch: str | None,
    stock_cuda: dict[str, str] | None = None,
) -> str:
    """16 hex digits. `tree` is the git name of upstream's root tree, `flags` are CGO_CFLAGS and
    CGO_CXXFLAGS as the build sets them, `stock_cuda` the libraries that come from a stock Ollama.
    BuildError where a compiler does not answer.
    """
    decisive = {
        "tag": tag,
        "tree": tree,
        "patchset": patchset.computing_digest,
        "storing": patchset.storing,
        "kind": kind,
        "go_tags": go_tags,
        "go": go,
        "compilers": list(_compilers(flags)),
        "environment": flag_environment(),
        "cuda": [_nvcc(cuda), cuda_arch] if cuda else None,
    }
    if stock_cuda:  # only then: other builds keep the names that they have
        decisive["stock_cuda"] = stock_cuda
    return hashlib.sha256(json.dumps(decisive, sort_keys=True).encode()).hexdigest()[:DIGITS]


def compiler_digest(flags: dict[str, str], cuda: Cuda | None) -> str:
    """Changes with the compilers, their flags, or the processor that `native` stands for."""
    said = [*_compilers(flags), _nvcc(cuda) if cuda else None, flag_environment()]
    return hashlib.sha256(json.dumps(said).encode()).hexdigest()


def flag_environment() -> dict[str, str]:
    """Those of the variables that are set."""
    return {name: value for name in FLAG_VARIABLES if (value := os.environ.get(name))}


def known_build_ids() -> frozenset[str]:
    """The names of all builds in the cache, including one whose successor could not be built."""
    cache = config.cache_dir()
    found = {name for one in cache.glob("builds/*/*/ollama*") if (name := build_id_of(one))}
    # the second is of an older `tiering`
    for stamp in (*cache.glob("builds/*/*/build.json"), *cache.glob("trees/*/stamp*.json")):
        try:
            name = json.loads(stamp.read_text(encoding="utf-8")).get("build")
        except (OSError, ValueError, AttributeError):
            continue
        if isinstance(name, str) and name:
            found.add(name)
    return frozenset(found)


def build_id_of(binary: Path) -> str:
    """The name that is linked into a binary; "" if there is none, or no such file."""
    try:
        with (
            binary.open("rb") as file,
            mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as all_,
        ):
            found = re.search(re.escape(MARK) + rb"([0-9a-f]{%d})" % DIGITS, all_)
            return found[1].decode() if found else ""
    except (OSError, ValueError):  # ValueError: an empty file
        return ""


def _compilers(flags: dict[str, str]) -> Iterator[str]:
    for variable, flags_variable, language, names in COMPILERS:
        command = command_of(variable, names)
        wanted = flags.get(flags_variable) or os.environ.get(flags_variable, "")
        yield wanted + "\n" + macros(command, shlex.split(wanted), language)


def macros(command: list[str], flags: list[str], language: str) -> str:
    """What the compiler predefines. gcc and clang list it; of another compiler
    the version must do.
    """
    done = run(*command, *flags, "-dM", "-E", "-x", language, os.devnull)
    if done.returncode:
        done = run(*command, "--version")
    if done.returncode:
        last = done.tail[-1] if done.tail else "no output"
        raise BuildError(f"{command[0]} does not say what it is: {last}", hint="check CC and CXX")
    # The time of compilation is not part of what a compiler is.
    return "\n".join(
        line for line in sorted(done.stdout.splitlines()) if not re.search(r"__(DATE|TIME)", line)
    )


def _nvcc(cuda: Cuda) -> str:
    done = run(cuda.nvcc, "--version")
    if done.returncode:
        raise BuildError(f"{cuda.nvcc} does not say what it is", hint="use --gpu off")
    return done.stdout
