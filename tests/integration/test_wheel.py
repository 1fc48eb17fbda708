"""The wheel: made with one compilation, and `tiering up` out of it where no checkout is."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import sysconfig
import zipfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from ollama_tiering import config
from ollama_tiering.kernels import compile as compiling
from ollama_tiering.launch.address import free_address
from ollama_tiering.patchset import manifest
from ollama_tiering.patchset.upstream import SourceCache
from tests.places import short_directory

REPO = Path(__file__).parents[2]
FAKE_OLLAMA = REPO / "tests/unit/launch/fake_ollama.py"
CACHE = SourceCache()

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]


@dataclass
class Made:
    """A source tree without history, its wheel, and what each compiler run was told."""

    root: Path
    log: Path
    wheel: Path

    def build(self) -> Path:
        """`pip wheel .` with what this Python has: no network."""
        target = self.root.parent / "dist"
        pip = [sys.executable, "-m", "pip", "wheel", "--quiet", "--disable-pip-version-check"]
        done = subprocess.run(
            [*pip, "--no-deps", "--no-build-isolation", "-w", str(target), "."],
            cwd=self.root,
            env=os.environ | {"CXX": str(self.root.parent / "compiler")},
            capture_output=True,
            text=True,
            timeout=600,
            check=False,
        )
        assert done.returncode == 0, done.stdout + done.stderr
        (self.wheel,) = target.glob("*.whl")
        return self.wheel

    @property
    def links(self) -> int:
        return sum("-shared" in line.split() for line in self.log.read_text().splitlines())


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Made:
    if shutil.which("g++") is None:
        pytest.skip("no g++ here: the wheel would carry no library")
    place = tmp_path_factory.mktemp("wheel")
    root = place / "source"
    junk = shutil.ignore_patterns("__pycache__", "build", "*.so")
    for name in ("ollama_tiering", "csrc", "patches", "llama_server"):
        shutil.copytree(REPO / name, root / name, ignore=junk)
    for name in ("pyproject.toml", "hatch_build.py", "README.md", "LICENSE", ".gitignore"):
        shutil.copy(REPO / name, root / name)
    log, compiler = place / "compiler.log", place / "compiler"
    compiler.write_text(f'#!/bin/sh\necho "$*" >>"{log}"\nexec g++ "$@"\n')
    compiler.chmod(0o755)
    result = Made(root, log, root)
    result.build()
    return result


def test_pip_wheel_compiles_once_and_a_second_one_not_at_all(made: Made) -> None:
    assert made.links == 1
    made.build()
    assert made.links == 1


def test_a_changed_source_is_compiled_again(made: Made) -> None:
    """The name of the folder decides, so nothing has to be compiled for this."""
    compiler = str(made.root.parent / "compiler")
    before = compiling.fingerprint(made.root / "csrc", compiler)
    assert (made.root / "build/wheel" / before[:16] / compiling.LIBRARY).is_file()
    header = made.root / "csrc/src/kernels.h"
    text = header.read_text()
    try:
        header.write_text(text + "// changed\n")
        assert compiling.fingerprint(made.root / "csrc", compiler) != before
    finally:
        header.write_text(text)


def of_llama_server() -> list[str]:
    """Its sources, as `tiering patch` wants them for an installed Ollama."""
    folder = REPO / "llama_server"
    every = (path for part in ("src", "cpu") for path in (folder / part).rglob("*"))
    found = [str(path.relative_to(folder)) for path in every if path.is_file()]
    assert {"src/kvt_rows.h", "cpu/score.cpp"} <= set(found)
    return found


def test_the_wheel_carries_what_it_needs_and_no_junk(made: Made) -> None:
    names = zipfile.ZipFile(made.wheel).namelist()
    assert "ollama_tiering/_lib/libpaged_attn.so" in names
    assert "ollama_tiering/_patches/series" in names
    assert "ollama_tiering/_csrc/sources.txt" in names
    parts = {name.split("/")[2] for name in names if name.startswith("ollama_tiering/_csrc/")}
    assert parts == {"cuda", "include", "reference", "shim", "sources.txt", "src"}
    ours = {f"ollama_tiering/_llama_server/{path}" for path in of_llama_server()}
    assert ours <= set(names)
    page = {f"ollama_tiering/web/static/{name}" for name in ("app.js", "index.html", "style.css")}
    assert page <= set(names)
    assert not [name for name in names if "__pycache__" in name or name.endswith((".o", ".pyc"))]


@dataclass
class Installed:
    """The wheel in an environment of its own, away from any checkout."""

    python: Path
    place: Path

    def run(self, *args: str) -> subprocess.CompletedProcess[str]:
        command = [str(self.python.with_name("tiering")), *args]
        return subprocess.run(
            command, cwd=self.place, env=self.env, capture_output=True, text=True, check=False
        )

    @property
    def env(self) -> dict[str, str]:
        own = {
            name: value
            for name, value in os.environ.items()
            if not name.startswith(("OLLAMA_", "XDG_", "PYTHON", "CGO_"))
        }
        folders = {
            f"XDG_{name}_HOME": str(self.place / name.lower())
            for name in ("STATE", "DATA", "CACHE", "CONFIG")
        }
        return own | folders | {
            "HOME": str(self.place),
            "XDG_RUNTIME_DIR": str(self.place / "run"),
            "OLLAMA_KV_TIER_RAM": str(self.place / "ram"),
            "PATH": f"{self.place / 'bin'}:{os.environ['PATH']}",
            "GOMODCACHE": os.environ.get("GOMODCACHE", str(config.cache_dir() / "go/mod")),
        }  # fmt: skip


def environment_of(way: str, wheel: Path, root: Path) -> Path:
    """The Python of a fresh environment that holds the wheel, made in one of the usual ways."""
    uv = shutil.which("uv")
    if way == "offline":  # the dependencies of this environment, so that no network is needed
        subprocess.run([sys.executable, "-m", "venv", "--without-pip", root], check=True)
        python = root / "bin/python"
        target = next(root.glob("lib/python3*/site-packages"))
        (target / "zz.pth").write_text(f"{sysconfig.get_path('purelib')}\n")
        pip = [sys.executable, "-m", "pip", "--python", str(python), "install", "--no-deps"]
        subprocess.run([*pip, "--quiet", "--force-reinstall", str(wheel)], check=True)
        return python
    if way == "pip":
        subprocess.run([sys.executable, "-m", "venv", root], check=True)
        _from_registry([str(root / "bin/python"), "-m", "pip", "install", "--quiet", str(wheel)])
        return root / "bin/python"
    if uv is None:
        pytest.skip("no uv on PATH")
    places = {"UV_TOOL_DIR": str(root), "UV_TOOL_BIN_DIR": str(root / "links")}
    _from_registry([uv, "tool", "install", "--quiet", str(wheel)], places)
    return root / "ollama-tiering/bin/python"


def _from_registry(command: list[str], env: dict[str, str] | None = None) -> None:
    done = subprocess.run(
        command, env=os.environ | (env or {}), capture_output=True, text=True, check=False
    )
    said = done.stdout + done.stderr
    offline = ("Failed to establish a new connection", "Temporary failure", "dns error")
    if done.returncode and any(sign in said for sign in offline):
        pytest.skip("no package registry can be reached")
    assert done.returncode == 0, said


@pytest.fixture(params=["offline", "pip", "uv"])
def installed(request: pytest.FixtureRequest, made: Made) -> Iterator[Installed]:
    with short_directory() as place:
        (place / "run").mkdir(mode=0o700)
        (place / "bin").mkdir()
        yield Installed(environment_of(request.param, made.wheel, place / "env"), place)


def test_up_runs_out_of_the_wheel_and_builds_with_the_wheels_own_patches(
    installed: Installed,
) -> None:
    """Everything is real except the compilation: what Go would write is a stand-in for Ollama."""
    go = shutil.which("go")
    if go is None or not CACHE.has(config.DEFAULT_TAG):
        pytest.skip(f"needs Go, and {config.DEFAULT_TAG} in the source cache (tiering fetch)")
    ours = json.loads(installed.run("patch", "status", "--json").stdout)["patchset"]
    assert ours["digest"] == manifest.load().digest
    fake = installed.place / "fake_ollama"
    fake.write_text(f"#!{installed.python}\n{FAKE_OLLAMA.read_text()}")
    fake.chmod(0o755)
    wrapper = installed.place / "bin/go"
    wrapper.write_text(
        f'#!/bin/sh\n[ "$1" = build ] || exec "{go}" "$@"\n'
        f'while [ $# -gt 1 ]; do [ "$1" = -o ] && cp "{fake}" "$2"; shift; done\n'
    )
    wrapper.chmod(0o755)
    address = free_address()
    command = [str(installed.python.with_name("tiering")), "up", "--source", str(CACHE.root)]
    process = subprocess.Popen(
        [*command, "--cuda", "off", "--host", str(address)],
        cwd=installed.place,
        env=installed.env,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    try:
        assert process.stdout
        said = []
        for line in process.stdout:
            said.append(line)
            if line.startswith("ready: "):
                break
        else:
            raise AssertionError("".join(said))
        assert f"at {address.url}" in said[-1]
        assert any(line.startswith("patched ") for line in said)
    finally:
        process.send_signal(signal.SIGINT)
        process.communicate(timeout=60)
    assert process.returncode == 0


def test_it_brings_the_packages_that_its_commands_need(installed: Installed) -> None:
    """The model of a self-test, and the page."""
    made = installed.run("model", "make", "llama-tiny", "tiny.gguf")
    assert made.returncode == 0, made.stderr
    ask = "import ollama_tiering.web.server, ollama_tiering.patchset.llama_server.download"
    subprocess.run([installed.python, "-c", ask], env=installed.env, check=True)


def test_the_library_is_the_one_that_the_wheel_brought(installed: Installed) -> None:
    ask = "from ollama_tiering.kernels import library_path; print(library_path())"
    done = subprocess.run(
        [installed.python, "-c", ask],
        cwd=installed.place,
        env=installed.env,
        capture_output=True,
        text=True,
        check=True,
    )
    assert Path(done.stdout.strip()).is_relative_to(installed.place / "env")
