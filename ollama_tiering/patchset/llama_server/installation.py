"""The user's own Ollama from v0.30 on: where it is, which versions it is of. Only read.

`ollama` starts `llama-server` of its folder `lib/ollama`, once for each model. The folder also has
llama.cpp's libraries, and below it GGML's for GPUs.
"""

from __future__ import annotations

import contextlib
import os
import re
import shutil
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from ollama_tiering import config
from ollama_tiering.errors import MissingTool, UnsupportedUpstream, UsageError
from ollama_tiering.patchset import identity, manifest
from ollama_tiering.patchset.run import Finished, run
from ollama_tiering.system.files import without_links

AUTO: Final = "auto"  # of --ollama: look for one
SERVER: Final = "llama-server"
IMPLEMENTATION: Final = "libllama-server-impl.so"  # all of llama.cpp's tools/server
FIRST_VERSION: Final = manifest.LLAMA_SERVER_SINCE
PROGRAM_MAGIC: Final = b"\x7fELF"

_BELOW: Final = Path("lib/ollama")
_PREFIXES: Final = (Path("/usr/local"), Path("/usr"))  # of install.sh and of distributions
_UNITS: Final = tuple(
    Path(folder, "ollama.service")
    for folder in ("/etc/systemd/system", "/usr/lib/systemd/system", "/lib/systemd/system")
)
_ANSWER_SECONDS: Final = 60.0
_NOBODY: Final = {"OLLAMA_HOST": "127.0.0.1:1"}  # else a server that runs is asked, too


class OlderOllama(UnsupportedUpstream):
    """Has no llama-server, and never had: it is older than v0.30."""


FileState = list[list[str | int]]


@dataclass(frozen=True, slots=True)
class ServerBuild:
    """What llama-server says of itself. A build of a shallow clone counts one commit, so `number`
    may say nothing; `commit` is empty where it was not known.
    """

    number: int
    commit: str


@dataclass(frozen=True, slots=True)
class InstalledOllama:
    """`program` is `ollama`, `lib` the folder of its libraries; both without links."""

    program: Path
    lib: Path

    @property
    def server(self) -> Path:
        return self.lib / SERVER

    def version(self) -> str:
        """`v0.32.15`. UnsupportedUpstream where the program does not say it."""
        said = _said(self.program, "--version", env=_NOBODY)
        found = re.search(r"version is v?(\d[\w.+-]*)", "\n".join(said.tail))
        if found is None:
            raise UnsupportedUpstream(
                f"{self.program} does not say its version: {_last(said)}",
                hint="install Ollama again, or name another one with --ollama DIR",
            )
        return f"v{found[1]}"

    def build(self) -> ServerBuild:
        """UnsupportedUpstream where llama-server does not run."""
        said = _said(self.server, "--version")
        text = "\n".join(said.tail)
        new = re.search(r"version: \S+ \(build (\d+), commit (\w+)\)", text)
        found = new or re.search(r"version: (\d+) \((\w+)\)", text)
        if said.returncode or found is None:
            raise UnsupportedUpstream(
                f"{self.server} does not say its version: {_last(said)}",
                hint="install Ollama again, or name another one with --ollama DIR",
            )
        return ServerBuild(int(found[1]), "" if found[2] == "unknown" else found[2])

    def state(self) -> FileState:
        """Name, size and time (ns) of every file: changes with each of them, and is quick. A file
        that goes away meanwhile is none.
        """
        found: FileState = []
        for path in sorted(self._files()):
            with contextlib.suppress(OSError):
                info = path.stat()
                found.append([str(path), info.st_size, info.st_mtime_ns])
        return found

    def _files(self) -> Iterator[Path]:
        yield self.program
        seen: set[str] = set()
        for folder, below, names in os.walk(self.lib, followlinks=True):
            if (real := os.path.realpath(folder)) in seen:  # a link that leads back up
                below.clear()
                continue
            seen.add(real)
            yield from (path for name in names if _is_file(path := Path(folder, name)))


def find(named: str) -> InstalledOllama:
    """`named`: AUTO, or the folder above `bin` and `lib`. MissingTool where none is found,
    UsageError where that folder has none, UnsupportedUpstream for one without llama-server.
    """
    if named != AUTO:
        place = config.expanded(named).absolute()
        program = next((p for p in _programs_of(place) if _runs(p)), None)
        if program is None:
            raise UsageError(
                f"{place}: no bin/ollama there",
                hint="--ollama names the folder above bin and lib of an installed Ollama",
            )
        return _required(program)
    programs = list(_usual_programs())
    for program in programs:
        if found := at(program):
            return found
    if programs:
        return _required(programs[0])
    raise MissingTool(
        "no installed Ollama on PATH, in ollama.service, or in " + " or ".join(map(str, _PREFIXES)),
        hint="install Ollama, or name its folder: --ollama DIR",
    )


def usual() -> InstalledOllama | None:
    """The one that `find(AUTO)` would return, if there is one."""
    return next((found for p in _usual_programs() if (found := at(p))), None)


def usual_program() -> Path | None:
    """The `ollama` of that one; else of one that is older than v0.30."""
    found = usual()
    return found.program if found else next(_usual_programs(), None)


def usual_name(program: Path, *, on_path: bool) -> Path:
    """How the service, an installer or (`on_path`) a shell names it: still right where an update
    changes what a link leads to. Itself, where no such name leads to it.
    """
    return next(_names_of(program, on_path=on_path), program)


def is_usual(program: Path) -> bool:
    """Whether a shell, the service or an installer has a name for it."""
    return next(_names_of(program, on_path=True), None) is not None


def _names_of(program: Path, *, on_path: bool) -> Iterator[Path]:
    names = (*(_on_path() if on_path else ()), *_in_usual_places())
    return (name for name in names if without_links(name) == program)


def require_none_broken() -> None:
    """UnsupportedUpstream where an `ollama` in the usual places is of v0.30 or later, or does not
    run, and has no llama-server: one that is installed just now, or one that was damaged.
    """
    for program in _usual_programs():
        if program.name == "ollama" and at(program) is None and not _is_older(program):
            raise _not_whole(program)


def require_program(installation: InstalledOllama) -> None:
    """UnsupportedUpstream for a script: in a tree it would start the installed `ollama`, which uses
    its own llama-server.
    """
    if not _is_binary(installation.program):
        raise UnsupportedUpstream(
            f"{installation.program} is no program, but a script that starts one",
            hint="name the folder of the real one: --ollama DIR",
        )


def _is_binary(program: Path) -> bool:
    """Also one that this user may run and not read: a script cannot be run so."""
    try:
        with program.open("rb") as file:
            return file.read(len(PROGRAM_MAGIC)) == PROGRAM_MAGIC
    except PermissionError:
        return True


def _is_older(program: Path) -> bool:
    """Also true of a script that says no version: it is for something else."""
    try:
        said = InstalledOllama(program, program.parent).version()
    except UnsupportedUpstream:
        return not _is_binary(program)
    return tuple(int(part) for part in re.findall(r"\d+", said)[:3]) < FIRST_VERSION


def _usual_programs() -> Iterator[Path]:
    """As a shell, the service and an installer would have it, without our own builds."""
    candidates = (*_on_path(), *_in_usual_places())
    for candidate in dict.fromkeys(without_links(path) for path in candidates if _runs(path)):
        ours = candidate.is_relative_to(without_links(config.cache_dir()))
        if not ours and not identity.build_id_of(candidate):
            yield candidate


def _on_path() -> Iterator[Path]:
    if found := shutil.which("ollama"):
        yield Path(found)


def _in_usual_places() -> Iterator[Path]:
    yield from filter(None, map(_started_by, _UNITS))
    yield from (prefix / "bin/ollama" for prefix in _PREFIXES)


def _started_by(unit: Path) -> Path | None:
    try:
        text = unit.read_text(encoding="utf-8", errors="replace")
    except OSError:
        return None
    found = re.search(r"^ExecStart=[-@:+!]*(/\S+)", text, re.MULTILINE)
    return Path(found[1]) if found else None


def _programs_of(place: Path) -> tuple[Path, ...]:
    return place / "bin/ollama", place / "ollama"


def _runs(path: Path) -> bool:
    return _is_file(path) and os.access(path, os.X_OK)


def _is_file(path: Path) -> bool:
    """False in a folder that this user may not search."""
    try:
        return path.is_file()
    except PermissionError:
        return False


def at(program: Path) -> InstalledOllama | None:
    """With its libraries where `ollama` looks for them: from its own place, without links. None
    where one of them is not there.
    """
    program = without_links(program)
    for above in (program.parent.parent, program.parent):
        lib = above / _BELOW
        if _runs(program) and _runs(lib / SERVER):
            return InstalledOllama(program, without_links(lib))
    return None


def _required(program: Path) -> InstalledOllama:
    if found := at(program):
        return found
    raise _not_whole(program)


def _not_whole(program: Path) -> UnsupportedUpstream:
    if _is_older(program):
        return OlderOllama(
            f"{program} has no {_BELOW / SERVER}: it is older than v0.30",
            hint="versions before v0.30 are built from source: tiering patch --tag TAG",
        )
    return UnsupportedUpstream(
        f"{program} has no {_BELOW / SERVER}: it is not whole (an update may be under way)",
        hint="install it again; or build a version with the Go engine: tiering patch --tag TAG",
    )


def _said(program: Path, *words: str, env: dict[str, str] | None = None) -> Finished:
    try:
        return run(program, *words, env=env, seconds=_ANSWER_SECONDS)
    except OSError as error:  # damaged, or for another processor
        return Finished(1, "", (str(error.strerror),))


def _last(said: Finished) -> str:
    return said.tail[-1] if said.tail else "it says nothing"
