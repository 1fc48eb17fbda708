"""A pip to install Go or CMake with: this Python's, uv's, or the standard library's."""

from __future__ import annotations

import importlib.util
import subprocess
import sys
from pathlib import Path

import pytest

from ollama_tiering.errors import MissingTool
from ollama_tiering.patchset import pip
from ollama_tiering.patchset.pip import pip_install
from ollama_tiering.patchset.run import Finished

REPO = Path(__file__).parents[3]


@pytest.fixture
def no_pip(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """As in a checkout's .venv; the folder that PATH consists of."""
    monkeypatch.setattr(importlib.util, "find_spec", lambda _name: None)
    monkeypatch.setenv("PATH", str(tmp_path))
    return tmp_path


def test_this_pythons_own_pip_comes_first() -> None:
    with pip_install() as (command, env):
        assert command[:4] == (sys.executable, "-m", "pip", "--disable-pip-version-check")
        assert env == {}


def test_without_one_uv_installs_for_this_python(no_pip: Path) -> None:
    uv = no_pip / "uv"
    uv.write_text("#!/bin/sh\n")
    uv.chmod(0o755)
    with pip_install() as (command, _):
        assert command == (str(uv), "pip", "install", "--quiet", "--python", sys.executable)


_ASK = """
import os, subprocess, sys
from pathlib import Path
from ollama_tiering.patchset.pip import pip_install
with pip_install() as (command, env):
    folder = Path(env["PYTHONPATH"])
    version = subprocess.run([*command[:3], "--version"], env=os.environ | env, check=True)
    assert (folder / "pip/__main__.py").is_file()
assert not folder.exists()
"""


@pytest.mark.slow
def test_without_either_the_standard_librarys_is_there_for_the_moment(
    no_pip: Path, tmp_path: Path
) -> None:
    bare = tmp_path / "bare"
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", bare], check=True)
    environment = {"PATH": str(no_pip), "PYTHONPATH": str(REPO)}
    command = [bare / "bin/python", "-c", _ASK]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith("pip ")


def test_where_there_is_none_at_all_the_cure_is_named(
    no_pip: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    answer = Finished(1, "", ("No module named ensurepip",))
    monkeypatch.setattr(pip, "run", lambda *_a, **_k: answer)
    with (
        pytest.raises(MissingTool, match="No module named ensurepip") as caught,
        pip_install(),
    ):
        pass
    assert "python3-venv" in str(caught.value.hint)
