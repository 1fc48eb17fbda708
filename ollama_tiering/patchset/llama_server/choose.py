"""Which Ollama a command means: a version with the Go engine, which is built from source, or the
installed one that runs llama-server. `tiering patch` and `tiering up` choose alike.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from ollama_tiering.config import PatchConfig, load
from ollama_tiering.errors import UnsupportedUpstream, UsageError
from ollama_tiering.patchset.binary import named_binary
from ollama_tiering.patchset.build import built_binaries
from ollama_tiering.patchset.llama_server import built, installation
from ollama_tiering.patchset.llama_server.installation import AUTO as AUTO
from ollama_tiering.patchset.llama_server.installation import InstalledOllama


def chosen(ollama: str | None, go_options: Mapping[str, Any]) -> InstalledOllama | None:
    """The installed Ollama, or None for a version with the Go engine. The first of these decides:

    1. `--ollama`, or an option that is for the Go engine (`go_options`); not both
    2. OLLAMA_TIERING_BINARY, or a version in the settings: the Go engine
    3. what was patched before: an installed Ollama, then a build of the Go engine
    4. an installed Ollama that runs llama-server; without one, the Go engine

    UnsupportedUpstream where the installed one that 3 or 4 means is gone, or not whole: an update
    takes minutes, and an engine of another version must not take its place meanwhile.
    """
    require_one_engine(ollama, go_options)
    if ollama is not None:
        return installation.find(ollama)
    if any(go_options.values()) or named_binary() or load().patch.tag != PatchConfig().tag:
        return None
    if before := patched_before():
        return before
    if built_binaries():
        return None
    found = installation.usual()
    if found is None:
        installation.require_none_broken()
    return found


def require_one_engine(ollama: str | None, go_options: Mapping[str, Any]) -> None:
    """UsageError where options are for both."""
    given = [f"--{name.replace('_', '-')}" for name, value in go_options.items() if value]
    if ollama is not None and given:
        raise UsageError(
            f"{given[0]} is for versions with the Go engine, and --ollama for later ones",
            hint="leave out one of them",
        )


def patched_before() -> InstalledOllama | None:
    """The installed Ollama that was patched last and is there; None where none ever was."""
    programs = list(dict.fromkeys(tree.program for tree in built.trees()))
    for program in programs:
        if found := installation.at(Path(program)):
            return found
    if programs:
        raise UnsupportedUpstream(
            f"{programs[0]}, which was patched, is gone or not whole (an update may be under way)",
            hint="install it again; or take another one with --ollama auto, or --ollama DIR, or a "
            "version with the Go engine with --tag TAG; `tiering patch revert --ollama auto` "
            "forgets it",
        )
    return None
