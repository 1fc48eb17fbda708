"""The C compilers' flags of a build by cgo, for the processor that it is for.

`-march=native` switches on all that the processor has. cgo compiles no AMX code, but GGML calls it
where the compiler predefines `__AMX_INT8__`. So AMX is left out, by what the compiler itself says
of its flags: of ours, and of a person's own. Compiled in, it would multiply Q4_0 and Q4_1 wrongly
(tests/integration/test_amx.py).
"""

from __future__ import annotations

import hashlib
import os
import re
import shlex

from ollama_tiering.errors import BuildError
from ollama_tiering.patchset import compilers, identity

NATIVE = "native"
_AMX = re.compile(r"^#define __AMX_(\w+?)__ ", re.MULTILINE)
_NATIVE_FLAG = re.compile(r"(^|\s)-m(arch|cpu|tune)=native(\s|$)")


def cgo_flags(march: str | None) -> dict[str, str]:
    """CGO_CFLAGS and CGO_CXXFLAGS: those of the environment, else ours for `march` (None: none),
    without what cgo has no code for. A variable that needs no value is left out.
    """
    ours = f"-O3 -march={march}" if march else ""
    made = {}
    for variable, flags_variable, language, names in compilers.COMPILERS:
        command = compilers.command_of(variable, names)
        flags = os.environ.get(flags_variable) or ours
        more = [processor_flag()] if _NATIVE_FLAG.search(flags) else []
        more += _left_out(command, flags, language)
        made[flags_variable] = " ".join([flags, *more]).strip()
    return {name: value for name, value in made.items() if value}


def processor_flag() -> str:
    """A macro that nobody reads, named after the processor that `-march=native` stands for here.

    Go's cache and our stamp go by the text of the flags: without it they would take what another
    processor's `native` made, after a cache was moved or on a home that machines share.
    """
    variable, _, language, names = compilers.COMPILERS[0]
    macros = identity.macros(compilers.command_of(variable, names), ["-march=native"], language)
    return "-DTIERING_CPU_" + hashlib.sha256(macros.encode()).hexdigest()[:8]


def _left_out(command: list[str], flags: str, language: str) -> list[str]:
    """`-mno-amx-…` for each part of AMX that is switched on; the compiler knows those names."""
    given = shlex.split(os.environ.get("CGO_CPPFLAGS", "")) + shlex.split(flags)
    found = _AMX.findall(identity.macros(command, given, language))
    off = [f"-mno-amx-{name.lower().replace('_', '-')}" for name in found]
    if off and _AMX.search(identity.macros(command, [*given, *off], language)):
        raise BuildError(
            f"{command[0]}: {shlex.join(off)} does not switch AMX off, which cgo has no code for",
            hint="set CGO_CFLAGS and CGO_CXXFLAGS to '-O3 -march=x86-64-v4'",
        )
    return off
