"""The C++ standard library's headers, compiled once instead of in each of 200 files of llama.cpp.

A build for this processor alone spends a fifth of its time on reading them. The compiler uses the
compiled form only if it was made with the same options, and otherwise reads the header itself. The
result is the same either way.
"""

from __future__ import annotations

import shlex
import shutil
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

from ollama_tiering.errors import MissingTool
from ollama_tiering.patchset.run import run

# None of them depends on a macro that a source file defines first, as <cassert> does on NDEBUG.
NAMES = """
    algorithm array atomic chrono cinttypes climits cmath condition_variable cstddef cstdint cstdio
    cstdlib cstring fstream functional iomanip iostream limits list map memory mutex numeric
    optional queue random regex set sstream stdexcept string thread tuple type_traits
    unordered_map unordered_set utility vector
""".split()  # noqa: SIM905
STANDARD = "-std=c++17"  # what every C++ package of upstream asks for
COMPILED = ".gch"  # the ending that g++ and clang++ look for beside a header


@contextmanager
def precompiled(
    go: Path, flags: str, folder: Path, environment: Mapping[str, str | None]
) -> Iterator[str]:
    """CGO_CXXFLAGS for a build with `flags`; the compiled header lies in `folder` meanwhile.
    `environment` is Go's.

    Go's cache knows packages by their flags, so the header always has the same path. If the
    compiler cannot do it, the flags are returned as they are.
    """
    header = folder / "headers" / "std.h"
    header.parent.mkdir(parents=True, exist_ok=True)
    try:
        header.write_text("".join(f"#include <{name}>\n" for name in NAMES), encoding="utf-8")
        made = _compile(go, flags, header, environment)
        yield f"{flags} -include {shlex.quote(str(header))}" if made else flags
    finally:
        shutil.rmtree(header.parent)


def _compile(go: Path, flags: str, header: Path, environment: Mapping[str, str | None]) -> bool:
    """Uses Go's C++ compiler, with those of Go's options that a compiled header has to share."""
    said = run(go, "env", "CXX", "GOGCCFLAGS", env=environment).stdout.splitlines()
    if len(said) != 2:
        return False
    compiler, options = map(shlex.split, said)
    shared = [flag for flag in options if flag.startswith(("-fPIC", "-m", "-pthread"))]
    command = [*compiler, *shared, STANDARD, *shlex.split(flags), "-x", "c++-header", str(header)]
    try:
        return run(*command, "-o", f"{header}{COMPILED}").returncode == 0
    except MissingTool:
        return False  # what the build says about it is worth more
