"""Packages that only some commands need: the extras of pyproject.toml.

A command calls `need` before it starts to work, so that nobody waits for a measurement whose model
cannot be made. If this runs in a checkout's own `.venv`, what is missing is installed
(`scripts/extra`, from a lock file). Everywhere else the error names the command to run.
"""

from __future__ import annotations

import importlib
import importlib.util
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

from ollama_tiering.errors import MissingTool

CHECKOUT = Path(__file__).resolve().parent.parent


@dataclass(frozen=True, slots=True)
class Extra:
    """`modules` are what its packages are imported as; `purpose` completes "... needs gguf"."""

    modules: tuple[str, ...]
    purpose: str


EXTRAS = {
    "models": Extra(("gguf",), "a test model"),
    "web": Extra(("starlette", "uvicorn"), "the page"),
    "cuda": Extra(("nvidia.cuda_nvrtc",), "a kernel on a GPU (its compiler, NVRTC)"),
}


def need(name: str) -> None:
    """The packages of an extra can be imported when this returns; else MissingTool, exit code 6."""
    if not missing(name):
        return
    if script := installer():
        done = subprocess.run([script, name], stdin=subprocess.DEVNULL, stdout=2, check=False)
        importlib.invalidate_caches()
        if done.returncode == 0 and not missing(name):
            return
    raise lacking(name)


def lacking(name: str) -> MissingTool:
    """The error that says which package is missing, for what, and the command that brings it."""
    extra = EXTRAS[name]
    script = installer()
    cure = f"{script} {name}" if script else f"pip install 'ollama-tiering[{name}]'"
    return MissingTool(f"{extra.purpose} needs {', '.join(extra.modules)}", hint=cure)


def of_module(module: str | None) -> str | None:
    """The extra that brings a module or the package it lies in; None: no extra does."""
    top = (module or "").partition(".")[0]
    return next((name for name, extra in EXTRAS.items() if top in extra.modules), None)


def missing(name: str) -> list[str]:
    """The modules of an extra that are not installed."""
    return [module for module in EXTRAS[name].modules if not _installed(module)]


def _installed(module: str) -> bool:
    try:
        return importlib.util.find_spec(module) is not None
    except ModuleNotFoundError:  # the package that it lies in
        return False


def installer() -> Path | None:
    """`scripts/extra` of the checkout whose `.venv` runs this; None for an installed package."""
    script = CHECKOUT / "scripts/extra"
    own = Path(sys.prefix) == CHECKOUT / ".venv"
    return script if own and script.is_file() else None
