"""Which C and C++ compilers a build uses: those of the environment, else the first that is here."""

from __future__ import annotations

import os
import shlex
import shutil

COMPILERS = (
    ("CC", "CGO_CFLAGS", "c", ("gcc", "cc", "clang")),
    ("CXX", "CGO_CXXFLAGS", "c++", ("g++", "c++", "clang++")),
)


def command_of(variable: str, names: tuple[str, ...]) -> list[str]:
    given = shlex.split(os.environ.get(variable, ""))
    return given or [next((name for name in names if shutil.which(name)), names[0])]


def compiler_names() -> dict[str, str]:
    """CC and CXX where Go would not find a compiler by itself: it looks for gcc and g++ alone."""
    return {
        variable: command_of(variable, names)[0]
        for variable, _, _, names in COMPILERS
        if not os.environ.get(variable) and not shutil.which(names[0])
    }
