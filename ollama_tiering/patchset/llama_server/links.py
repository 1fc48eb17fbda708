"""A tree of links: an installed Ollama as it is, but for one library, and one more.

`ollama` looks for its libraries from where its own file lies, without links, so the tree has a file
of that name: a hard link, or a copy. `llama-server` is copied for the same reason, and a guard has
its name. All else links to the installed file or folder. Nothing that is installed is written.
"""

from __future__ import annotations

import contextlib
import os
import shutil
from collections.abc import Collection, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from ollama_tiering.patchset.llama_server import guard
from ollama_tiering.patchset.llama_server.installation import (
    IMPLEMENTATION,
    SERVER,
    FileState,
    InstalledOllama,
)

PROGRAM: Final = Path("bin/ollama")
LIB: Final = Path("lib/ollama")
EXACT: Final = "libggml-cpu-exact.so"  # exact_library.py


@dataclass(frozen=True, slots=True)
class TreeEntry:
    """One thing of a tree, at `path` in it: `source` as a file, a link to it, or a program of this
    text.
    """

    path: Path
    source: Path | None = None
    is_link: bool = False
    text: str = ""


def entries(
    installation: InstalledOllama,
    state: FileState,
    version: str,
    implementation: Path,
    refused: Collection[str] = (),
    exact: Path | None = None,
) -> Iterator[TreeEntry]:
    """All of a tree; `implementation` is our library, compiled for the files of that state and
    version, `refused` the kinds that failed its self-test, `exact` our exact attention. The guard
    is the last, so that none lets a library be used that is not there yet.
    """
    yield TreeEntry(PROGRAM, installation.program)
    ours = {IMPLEMENTATION: implementation} | ({EXACT: exact} if exact else {})
    for name, library in ours.items():
        yield TreeEntry(LIB / name, library)
    for installed in sorted(installation.lib.iterdir()):
        if installed.name == SERVER:
            yield TreeEntry(LIB / guard.COPY, installed)
        elif installed.name not in ours:
            yield TreeEntry(LIB / installed.name, installed, is_link=True)
    yield TreeEntry(LIB / SERVER, text=guard.text(installation, state, version, refused))


def lay(tree: Path, every: Iterator[TreeEntry]) -> None:
    """`tree` must not have these folders yet."""
    (tree / PROGRAM).parent.mkdir(parents=True)
    (tree / LIB).mkdir(parents=True)
    for entry in every:
        target = tree / entry.path
        if entry.source is None:
            target.write_bytes(os.fsencode(entry.text))
            target.chmod(0o755)
        elif entry.is_link:
            target.symlink_to(entry.source)
        elif entry.path == PROGRAM:
            _same_file(entry.source, target)
        else:
            shutil.copy2(entry.source, target)


def write_guard(
    server: Path,
    installation: InstalledOllama,
    state: FileState,
    version: str,
    refused: Collection[str],
) -> None:
    """Over the one of a tree that is not used yet: `refused` kinds are served as stock."""
    server.write_bytes(os.fsencode(guard.text(installation, state, version, refused)))


def _same_file(installed: Path, target: Path) -> None:
    with contextlib.suppress(OSError):  # another file system, or somebody else's file
        target.hardlink_to(installed)
        return
    shutil.copy2(installed, target)
