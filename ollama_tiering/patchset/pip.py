"""A pip to install with, even if this Python has none: a checkout's `.venv` has lost it, because it
is a tenth of the whole, and `uv tool install` never brings one.
"""

from __future__ import annotations

import importlib.util
import shutil
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from ollama_tiering.errors import MissingTool
from ollama_tiering.patchset.run import run

_OPTIONS = ("--disable-pip-version-check", "--no-input", "install", "--quiet")


@contextmanager
def pip_install() -> Iterator[tuple[tuple[str, ...], dict[str, str]]]:
    """(start of an install command, environment that it needs): this Python's own pip, else uv's,
    else the standard library's. MissingTool if there is none.
    """
    if not importlib.util.find_spec("pip") and (uv := shutil.which("uv")):
        yield (uv, "pip", "install", "--quiet", "--python", sys.executable), {}
        return
    with pip() as (command, environment):
        yield (*command, *_OPTIONS), environment


@contextmanager
def pip() -> Iterator[tuple[tuple[str, ...], dict[str, str]]]:
    """(start of any pip command, environment that it needs): this Python's own pip, else the one
    that the standard library carries, unpacked as long as this lasts. MissingTool if there is none.
    """
    command = (sys.executable, "-m", "pip")
    if importlib.util.find_spec("pip"):
        yield command, {}
        return
    with tempfile.TemporaryDirectory(prefix="tiering-pip-") as scratch:
        yield command, {"PYTHONPATH": str(_unpacked(Path(scratch)))}


def _unpacked(root: Path) -> Path:
    """The folder below `root` into which ensurepip has put pip."""
    done = run(sys.executable, "-m", "ensurepip", "--root", root)
    found = next(root.rglob("pip/__main__.py"), None)
    if done.returncode or found is None:
        why = done.tail[-1] if done.tail else "it did nothing"
        raise MissingTool(
            f"no pip: not in {sys.prefix}, no uv on PATH, and ensurepip failed: {why}",
            hint="install uv, or Python's venv package (Debian, Ubuntu: apt-get install "
            "python3-venv)",
        )
    return found.parent.parent
