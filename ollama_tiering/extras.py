"""Packages that only some commands need: the extras of pyproject.toml.

A command calls `need` before it starts to work, so that nobody waits for what cannot be done. If
this runs in a checkout's own `.venv`, what is missing is installed (`scripts/extra`, from a lock
file). Everywhere else the error names the command that installs it into this environment.
"""

from __future__ import annotations

import importlib
import importlib.util
import shlex
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

from ollama_tiering.errors import MissingTool

CHECKOUT = Path(__file__).resolve().parent.parent


@dataclass(frozen=True, slots=True)
class Extra:
    """`modules` are what its packages are imported as; `purpose` completes "... needs nvidia.…";
    `requirements` are those of pyproject.toml.
    """

    modules: tuple[str, ...]
    purpose: str
    requirements: tuple[str, ...]


EXTRAS = {
    "cuda": Extra(
        ("nvidia.cuda_nvrtc",),
        "a kernel on a GPU (its compiler, NVRTC)",
        ("nvidia-cuda-nvrtc-cu12>=12.9,<13",),
    ),
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
    cure = f"{script} {name}" if script else install_command(*extra.requirements)
    return MissingTool(f"{extra.purpose} needs {', '.join(extra.modules)}", hint=cure)


def install_command(*requirements: str) -> str:
    """The one that brings packages into this environment, with pip if it has one (`pip`, `pipx`),
    else with uv (`uv tool install`). Never by the name of this package: whatever a registry has
    under it is not ours.
    """
    has_pip = importlib.util.find_spec("pip") is not None
    start = (sys.executable, "-m", "pip") if has_pip else ("uv", "pip")
    more = () if has_pip else ("--python", sys.executable)
    return shlex.join([*start, "install", *more, *requirements])


def of_module(module: str | None) -> str | None:
    """The extra that brings a module or the package it lies in; None: no extra does."""
    for name, extra in EXTRAS.items():
        for own in extra.modules:
            if module and (f"{module}.".startswith(f"{own}.") or own.startswith(f"{module}.")):
                return name
    return None


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
