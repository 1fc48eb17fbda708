"""Hatchling's hook: a wheel built where a C++ compiler is carries libpaged_attn.so and is named for
this platform. Without one the wheel is pure Python, and the library is compiled at its first use.

What was compiled lies below build/wheel under the digest of its sources and compiler, so that a
front end that asks twice, or a second wheel of the same sources, compiles once.
"""

from __future__ import annotations

import importlib.util
import sys
import sysconfig
from pathlib import Path
from types import ModuleType
from typing import Any

from hatchling.builders.hooks.plugin.interface import BuildHookInterface

# Of other machines compilers and wheels have other names.
_SAME_EVERYWHERE = ("x86_64", "aarch64")


class PagedAttention(BuildHookInterface[Any]):
    """Target `wheel` only; an editable install uses the sources beside it."""

    PLUGIN_NAME = "custom"

    def initialize(self, version: str, build_data: dict[str, Any]) -> None:
        if version == "editable":
            return
        compiling = _load(Path(self.root, "ollama_tiering/kernels/compile.py"))
        compiler = compiling.find_compiler()
        if compiler is None:
            self.app.display_warning("no C++ compiler: the wheel carries no libpaged_attn.so")
            return
        csrc = Path(self.root, "csrc")
        folder = Path(self.root, "build", "wheel", compiling.fingerprint(csrc, compiler)[:16])
        library = folder / compiling.LIBRARY
        if not library.is_file():
            self.app.display_info("compiling the attention kernels, half a minute of a processor")
            compiling.compile_library(csrc, compiler, library)
        build_data["force_include"][str(library)] = f"ollama_tiering/_lib/{compiling.LIBRARY}"
        build_data["pure_python"] = False
        build_data["tag"] = f"py3-none-{_platform(compiling.machine_of(compiler))}"


def _platform(machine: str) -> str:
    """As wheels name it: this one, unless the compiler compiles for another machine."""
    name = sysconfig.get_platform()
    if name.startswith("linux-") and machine in _SAME_EVERYWHERE:
        name = f"linux-{machine}"
    return name.replace("-", "_").replace(".", "_")


def _load(path: Path) -> ModuleType:
    """The module alone: the package's dependencies are not there while it is built."""
    spec = importlib.util.spec_from_file_location("paged_attn_compile", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # dataclasses look their module up
    spec.loader.exec_module(module)
    return module
