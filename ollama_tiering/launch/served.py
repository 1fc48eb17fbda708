"""Which `ollama` a `tiering up` serves that is not an installed one of v0.30 or later by choice: a
build of ours; an installed one as stock, where none can be built; or, where the settings cannot be
read, what was asked for and is there.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ollama_tiering.config import PatchConfig, load
from ollama_tiering.config.salvage import asked
from ollama_tiering.errors import BuildError, ConfigError, TieringError, UsageError
from ollama_tiering.launch.unharmed import in_one_line
from ollama_tiering.patchset import failure
from ollama_tiering.patchset.binary import ENV_BINARY, named_binary, patched_binary, ready_build
from ollama_tiering.patchset.build import built_binaries
from ollama_tiering.patchset.llama_server import choose, installation
from ollama_tiering.patchset.llama_server.installation import InstalledOllama
from ollama_tiering.patchset.report import Report
from ollama_tiering.patchset.upstream import normal_tag
from ollama_tiering.system.own_process import is_set


@dataclass(frozen=True, slots=True)
class Served:
    """`why_stock`: not even the sidecar is tried. `installed`: it runs llama-server."""

    binary: Path
    why_stock: str = ""
    installed: InstalledOllama | None = None
    stands_in: bool = False  # for one that could not be built


def build_or_installed(build: Mapping[str, Any], report: Report) -> Served:
    """The patched Ollama, built if needed. Where that fails, an installed one as stock, if it is
    not another version than the one that was named.
    """
    try:
        return Served(patched_binary(report, **build))
    except ConfigError:
        raise
    except Exception as error:  # whatever it is, Ollama must start
        if isinstance(error, UsageError) and (any(build.values()) or is_set(ENV_BINARY)):
            raise  # a wrong option, or a wrong name in the variable
        program = installation.usual_program()
        if program is None or not _is_meant(program, build.get("tag")):
            raise
        why = f"{program} is served, for no patched Ollama could be built: {_in_one_line(error)}"
        return Served(program, why, installation.at(program), stands_in=True)


def _is_meant(program: Path, tag: str | None) -> bool:
    """Any is where no version is named; else that version."""
    settings = load().patch
    if not tag and settings.tag == PatchConfig().tag:
        return True
    try:
        version = InstalledOllama(program, program.parent).version()
    except TieringError:
        return False
    return version == normal_tag(tag or settings.tag)


def _in_one_line(error: Exception) -> str:
    """Adds what the compiler said first."""
    if isinstance(error, BuildError):
        first, told = error.message.splitlines()[0], failure.first_error(error)
        if told != first:
            error = BuildError(f"{first}: {told}", hint=error.hint)
    return in_one_line(error)


def ready_made(ollama: str | None, build: Mapping[str, Any], unreadable: ConfigError) -> Served:
    """Builds nothing if the settings cannot be read: what was asked for serves, as stock,
    if it is there; else `unreadable` is raised. It is never another Ollama.
    """
    choose.require_one_engine(ollama, build)
    why = f"{unreadable.message} ({unreadable.hint})"
    if ollama is not None:
        found = installation.find(ollama)
        return Served(found.program, why, found)
    if named := named_binary():
        return Served(named, why)
    wanted = asked({f"patch.{name}": build.get(name) for name in ("tag", "cpu", "cuda", "source")})
    if wanted.unknown - {"source"}:  # where it was fetched from changes nothing that is there
        raise unreadable
    any_will_do = not any(build.values()) and wanted.patch.tag == PatchConfig().tag
    if any_will_do and (before := choose.patched_before()):
        return Served(before.program, why, before)
    if binary := ready_build(wanted.patch):
        return Served(binary, why)
    if any_will_do and not built_binaries() and (found_now := installation.usual()):
        return Served(found_now.program, why, found_now)
    raise unreadable
