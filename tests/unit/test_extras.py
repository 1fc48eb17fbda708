"""Packages that only some commands need: found, installed in a checkout, else named."""

from __future__ import annotations

import re
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

from ollama_tiering import extras
from ollama_tiering.errors import MissingTool

REPO = Path(__file__).parents[2]
PROJECT = tomllib.loads((REPO / "pyproject.toml").read_text())["project"]
ONLY_IN_EXTRAS = ("nvidia-cuda-nvrtc",)
NOTHING = ("no_such_module_anywhere",)


@pytest.fixture
def absent(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of the extra `cuda`: a module that nobody has."""
    nothing = extras.Extra(NOTHING, "a kernel", ("no-such>=1,<2",))
    monkeypatch.setitem(extras.EXTRAS, "cuda", nothing)


def checkout(monkeypatch: pytest.MonkeyPatch, root: Path, script: str) -> None:
    """`scripts/extra` of a checkout whose .venv runs this."""
    (root / "scripts").mkdir()
    (root / "scripts/extra").write_text(f"#!/bin/sh\n{script}\n")
    (root / "scripts/extra").chmod(0o755)
    monkeypatch.setattr(extras, "CHECKOUT", root)
    monkeypatch.setattr(sys, "prefix", str(root / ".venv"))


def test_what_is_installed_is_not_asked_for() -> None:
    extras.need("cuda")


@pytest.mark.parametrize(
    ("has_pip", "start"),
    [(True, "{python} -m pip install"), (False, "uv pip install --python {python}")],
    ids=["pip", "uv"],
)
def test_out_of_a_package_the_command_for_this_environment_is_named(
    absent: None, monkeypatch: pytest.MonkeyPatch, has_pip: bool, start: str
) -> None:
    """By the package's own name: a registry may have anything under ours."""
    monkeypatch.setattr(sys, "prefix", "/usr")
    monkeypatch.setattr(
        "importlib.util.find_spec", lambda name: object() if name == "pip" and has_pip else None
    )
    with pytest.raises(MissingTool, match="a kernel needs no_such_module_anywhere") as caught:
        extras.need("cuda")
    assert caught.value.exit_code == 6
    assert caught.value.hint == f"{start.format(python=sys.executable)} 'no-such>=1,<2'"


def test_a_checkout_installs_it(
    absent: None, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    folder = tmp_path / "site"
    folder.mkdir()
    monkeypatch.syspath_prepend(str(folder))
    module = folder / "no_such_module_anywhere.py"
    checkout(monkeypatch, tmp_path, f'[ "$1" = cuda ] && touch "{module}"')
    extras.need("cuda")
    assert module.exists()


def test_a_checkout_that_fails_to_install_names_its_script(
    absent: None, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    checkout(monkeypatch, tmp_path, "exit 6")
    with pytest.raises(MissingTool) as caught:
        extras.need("cuda")
    assert caught.value.hint == f"{tmp_path}/scripts/extra cuda"


def test_modules_belong_to_their_extra() -> None:
    assert extras.of_module("nvidia.cuda_nvrtc.lib") == "cuda"
    assert extras.of_module("nvidia") == "cuda"
    assert extras.of_module("nvidia.cudnn") is None
    assert extras.of_module("numpy") is None
    assert extras.of_module(None) is None


@pytest.mark.parametrize("name", list(extras.EXTRAS))
def test_every_extra_is_declared_and_locked(name: str) -> None:
    assert PROJECT["optional-dependencies"][name] == list(extras.EXTRAS[name].requirements)
    assert (REPO / f"requirements-{name}.lock").is_file()
    usage = subprocess.run([REPO / "scripts/extra"], capture_output=True, text=True, check=False)
    assert usage.returncode == 2
    assert name in usage.stderr


@pytest.mark.parametrize("package", ONLY_IN_EXTRAS)
def test_the_first_install_does_not_have_them(package: str) -> None:
    assert not [need for need in PROJECT["dependencies"] if need.startswith(package)]
    assert f"\n{package}" not in (REPO / "requirements.lock").read_text()


def test_every_extra_that_a_command_needs_is_there() -> None:
    text = "".join(file.read_text() for file in (REPO / "ollama_tiering").rglob("*.py"))
    named = set(re.findall(r"extras\.(?:need|lacking)\(\"([^\"]*)\"\)", text))
    assert named
    assert named <= extras.EXTRAS.keys()
