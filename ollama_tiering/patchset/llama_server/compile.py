"""llama.cpp's tools/server with our part, compiled and linked against the installed libraries.

Only `libllama-server-impl.so` is made: some 16 files, with a C++ compiler and nothing else. What it
needs of llama.cpp and GGML it takes from the libraries that are there, so the code that computes is
the release's own. The linker has to find every symbol now (`-z defs`), and the loader at the start
(`-z now`): one that is missing is an error before the first chat, not in it.
"""

from __future__ import annotations

import os
import re
import shlex
import shutil
import signal
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from ollama_tiering.config import count
from ollama_tiering.errors import BuildError, MissingTool, UnsupportedUpstream
from ollama_tiering.patchset import tools
from ollama_tiering.patchset.llama_server import exported, linked, no_page
from ollama_tiering.patchset.llama_server.hooks import OURS, SERVER
from ollama_tiering.patchset.llama_server.installation import IMPLEMENTATION, InstalledOllama
from ollama_tiering.patchset.report import Report
from ollama_tiering.patchset.run import Finished, run
from ollama_tiering.patchset.tree import disk_full

LIBRARIES: Final = ("libllama-common", "libmtmd", "libllama", "libggml", "libggml-base")
MIN_GCC, MIN_CLANG = 11, 14
FLAGS: Final = ("-std=gnu++17", "-O2", "-DNDEBUG", "-fPIC", "-pthread", "-w")
DEFINED: Final = ("-DGGML_SHARED", "-DGGML_BACKEND_SHARED", "-DLLAMA_SHARED")
LINKED: Final = (
    *(f"-Wl,-soname,{IMPLEMENTATION}", "-Wl,-rpath,$ORIGIN", "-Wl,--build-id=sha1", "-Wl,-s"),
    *("-Wl,-z,defs", "-Wl,-z,now"),
)
INCLUDED: Final = ("tools/mtmd", ".", "common", "vendor", "include", "ggml/include")
HTTP: Final = "vendor/cpp-httplib"
EMBED: Final = "tools/ui/embed.cpp"
# common/subproc.h has another layout with it, so it must be as in the installed library.
SUBPROCESS: Final = ("subprocess_create_ex", "-DLLAMA_SUBPROCESS")
_MAIN: Final = "main.cpp"  # of the program llama-server, which stays the installed one
_IN_ENGLISH: Final = {"LC_ALL": "C"}  # what it says is read here and in exported.py
_NO_MEMORY: Final = re.compile("Killed signal|with signal 9|out of memory|Cannot allocate memory")


@dataclass(frozen=True, slots=True)
class CxxCompiler:
    """`identity` changes with it: its first macros, which name the version."""

    command: tuple[str, ...]
    identity: str


def find_compiler() -> CxxCompiler:
    """MissingTool where there is none, or too old a one for the libraries of a release."""
    command = tuple(tools.cxx_compiler())
    done = run(*command, "-dM", "-E", "-x", "c++", os.devnull)
    wanted = r"^#define (__GNUC__|__clang_major__|__VERSION__) (.+)$"
    macros = dict(re.findall(wanted, done.stdout, re.MULTILINE))
    clang, gcc = macros.get("__clang_major__"), macros.get("__GNUC__", "0")
    enough = int(clang) >= MIN_CLANG if clang else int(gcc) >= MIN_GCC
    if done.returncode or not enough:
        said = macros.get("__VERSION__", "unknown")
        raise MissingTool(
            f"{command[0]} is {said}: g++ {MIN_GCC} or clang++ {MIN_CLANG} is needed, or later",
            hint="install one, and name it with CXX",
        )
    return CxxCompiler(command, f"{shlex.join(command)} {macros.get('__VERSION__', '')}")


def library(installation: InstalledOllama, name: str) -> Path:
    """The installed file of `name`, by its plain name or one with a version."""
    found = sorted(installation.lib.glob(f"{name}.so*"), key=lambda path: len(path.name))
    if not found:
        raise UnsupportedUpstream(
            f"{installation.lib} has no {name}.so: its llama-server is built in another way",
            hint="only Ollama's own releases, and builds like them, can be patched",
        )
    return found[0]


def require_linkable(installation: InstalledOllama) -> None:
    """UnsupportedUpstream unless llama-server's own code lies in one library of its own, and the
    others are there and export what we use.
    """
    if not (installation.lib / IMPLEMENTATION).is_file():
        raise UnsupportedUpstream(
            f"{installation.lib} has no {IMPLEMENTATION}: its llama-server is built in another way",
            hint="only Ollama's own releases, and builds like them, can be patched",
        )
    for name in LIBRARIES:
        library(installation, name)
    exported.require(library(installation, "libllama"))


def compile_server(
    source: Path,
    installation: InstalledOllama,
    compiler: CxxCompiler,
    work: Path,
    report: Report,
    *,
    jobs: int | None = None,
) -> Path:
    """`source` has our lines and files; what is made lies in `work`. BuildError with the compiler's
    words, UnsupportedUpstream where a library lacks a symbol.
    """
    ui = _make_ui(source, compiler, work, report)
    table = work / linked.FILE
    table.write_text(linked.source([library(installation, name) for name in LIBRARIES]), "utf-8")
    units = _units(source, ui, table, installation)
    compile_all("llama-server", units, source, compiler, report, jobs)
    return _link([unit.object for unit in units], installation, compiler, work, report)


@dataclass(frozen=True, slots=True)
class CompileUnit:
    """A file, and with which flags an object is made of it."""

    file: Path
    object: Path
    flags: tuple[str, ...]


def compile_all(
    what: str,
    units: Sequence[CompileUnit],
    source: Path,
    compiler: CxxCompiler,
    report: Report,
    jobs: int | None,
) -> None:
    """Several at a time. BuildError has the compiler's words."""
    with report.stage(f"compiling {count(len(units), 'file')} of {what}") as detail:
        pool = ThreadPoolExecutor(jobs or os.cpu_count() or 1)
        try:
            running = [pool.submit(_compile, unit, source, compiler, report) for unit in units]
            for unit, one in zip(units, running, strict=True):
                detail(unit.file.name)
                one.result()
        finally:
            pool.shutdown(cancel_futures=True)


def _units(source: Path, ui: Path, table: Path, installation: InstalledOllama) -> list[CompileUnit]:
    """The longest first."""
    server, ours = source / SERVER, source / OURS
    symbol, flag = SUBPROCESS
    common = exported.symbols(library(installation, "libllama-common"))
    switches = (*DEFINED, flag) if symbol in common else DEFINED
    places = (server, ui, ours, *(source / part for part in INCLUDED))
    usual = tuple(f"-I{place}" for place in places)
    # llama.cpp's own headers are for our files alone: common/ has some of the same names.
    inner = (*FLAGS, *switches, f"-I{ours}", f"-I{source / 'src'}", *usual)
    usual = (*FLAGS, *switches, *usual)
    http = source / HTTP
    files = [
        *((path, usual) for path in server.glob("*.cpp") if path.name != _MAIN),
        *((path, inner) for path in (*ours.glob("*.cpp"), table)),
        *((path, usual) for path in ui.glob("*.cpp")),
        (http / "httplib.cpp", (*FLAGS, *_http_definitions(http))),
    ]
    files.sort(key=lambda one: (-one[0].stat().st_size, one[0].name))
    return [CompileUnit(path, ui.parent / f"{path.stem}.o", flags) for path, flags in files]


def _http_definitions(folder: Path) -> list[str]:
    """The sizes that llama.cpp compiles it with."""
    text = (folder / "CMakeLists.txt").read_text(encoding="utf-8")
    return [f"-D{found}" for found in re.findall(r"\bCPPHTTPLIB_\w+=\d+", text)]


def _make_ui(source: Path, compiler: CxxCompiler, work: Path, report: Report) -> Path:
    """The folder with `ui.h` and `ui.cpp`: a user interface without a page, as Ollama has it."""
    folder, program = work / "ui", work / "embed"
    folder.mkdir(parents=True)
    if no_page.has_templates(source):
        no_page.write(source, folder)
        return folder
    flags = ("-std=gnu++17", "-O1", "-w", "-o", program)
    run_compiler([*compiler.command, *flags, source / EMBED], work, report)
    run_compiler([program, folder / "ui.cpp", folder / "ui.h"], work, report)
    return folder


def _compile(unit: CompileUnit, source: Path, compiler: CxxCompiler, report: Report) -> None:
    # Without the name of the folder the same source gives the same library, wherever it is made.
    plain = f"-ffile-prefix-map={source.parent}=."
    command: list[str | Path]
    command = [*compiler.command, plain, *unit.flags, "-c", unit.file, "-o", unit.object]
    run_compiler(command, unit.object.parent, report)


def _link(
    objects: Sequence[Path],
    installation: InstalledOllama,
    compiler: CxxCompiler,
    work: Path,
    report: Report,
) -> Path:
    target = work / IMPLEMENTATION
    command: list[str | Path]
    command = [*compiler.command, "-shared", "-pthread", "-o", target, *sorted(objects)]
    command += [*LINKED, f"-Wl,-rpath-link,{installation.lib}"]
    command += [library(installation, name) for name in LIBRARIES]
    done = run(*command, env=_IN_ENGLISH, report=report)
    if done.returncode:
        if lacking := exported.undefined_in(done.tail):
            raise exported.not_exported(library(installation, "libllama"), lacking)
        raise _failed(command, done, work)
    return target


def run_compiler(command: Sequence[str | Path], work: Path, report: Report) -> None:
    """BuildError has its words. `work` is where it writes."""
    done = run(*command, env=_IN_ENGLISH, report=report)
    if done.returncode:
        raise _failed(command, done, work)


def _failed(command: Sequence[str | Path], done: Finished, work: Path) -> BuildError:
    if done.disk_was_full:
        return disk_full(work)
    tail = done.tail
    errors = [line for line in tail if "error" in line] or list(tail[-3:]) or ["it says nothing"]
    name = next(
        (Path(part).name for part in reversed(command) if str(part).endswith((".c", ".cpp"))), ""
    )
    what = f"compiling {name}" if name and "-c" in command else shutil.which(str(command[0]))
    cure = "this source does not fit this Ollama; tiering patch -v shows the command"
    if done.returncode == -signal.SIGKILL or _NO_MEMORY.search("\n".join(tail)):
        cure = "memory ran out: run again with --jobs 1"
    return BuildError(f"{what or command[0]} failed: {errors[0].strip()}", hint=cure)
