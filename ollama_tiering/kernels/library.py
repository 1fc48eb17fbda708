"""Finds libpaged_attn.so: the wheel, or csrc, compiled into the cache once per
sources and compiler.

Nothing is downloaded.
"""

from __future__ import annotations

import ctypes
import fcntl
import os
from functools import cache
from pathlib import Path

from ollama_tiering.config import places
from ollama_tiering.errors import BuildError, MissingTool, TieringError
from ollama_tiering.kernels import compile as compiling
from ollama_tiering.kernels.binding import bind
from ollama_tiering.system.locks import open_to_lock

PACKAGE = Path(__file__).resolve().parent.parent
SHIPPED = PACKAGE / "_lib" / compiling.LIBRARY


def csrc_dir() -> Path:
    """The sources: beside the package in a checkout, inside it in a wheel."""
    for place in (PACKAGE.parent / "csrc", PACKAGE / "_csrc"):
        if (place / compiling.SOURCES).is_file():
            return place
    raise TieringError(
        f"the sources of {compiling.LIBRARY} are neither beside {PACKAGE} nor in it",
        hint="install the package again",
    )


@cache
def load() -> ctypes.CDLL:
    """The library with the types of its functions. It is loaded once per process."""
    if SHIPPED.is_file():
        try:
            return bind(ctypes.CDLL(str(SHIPPED)))
        except OSError:
            pass  # made for another system, for example an older C library: compile it here
    built = build()
    try:
        return bind(ctypes.CDLL(str(built)))
    except OSError as error:
        raise BuildError(
            f"{built} was built but does not load: {error}", hint=f"delete {built.parent} and retry"
        ) from None


def library_path() -> Path:
    """The file that `load` gives."""
    return Path(load()._name)


def build() -> Path:
    """Compiles the library unless the cache has it. MissingTool without a compiler, BuildError if
    it fails.
    """
    csrc = csrc_dir()
    compiler = compiling.find_compiler()
    if compiler is None:
        raise MissingTool(
            f"no C++ compiler on PATH ($CXX, {', '.join(compiling.COMPILERS)}) to build "
            f"{compiling.LIBRARY} from {csrc}",
            hint="install one (Debian, Ubuntu: apt-get install g++) or set CXX",
        )
    folder = places.cache_dir() / "kernels"
    target = folder / compiling.fingerprint(csrc, compiler)[:16] / compiling.LIBRARY
    if target.is_file():
        return target
    try:
        with os.fdopen(open_to_lock(folder / "lock"), "r+b") as lock:
            # of two starters the second finds it made
            fcntl.flock(lock, fcntl.LOCK_EX)
            if not target.is_file():
                compiling.compile_library(csrc, compiler, target)
    except compiling.CompileFailed as error:
        raise BuildError(
            f"building {target} failed: {error}",
            hint="a compiler with C++17 is needed (g++ 10, clang 12 or later); CXX chooses one",
        ) from None
    except OSError as error:
        raise BuildError(
            f"building {target} failed: {error}",
            hint="free or choose a place with OLLAMA_TIERING_CACHE",
        ) from None
    return target
