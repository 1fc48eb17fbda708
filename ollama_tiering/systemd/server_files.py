"""The server's files in a service's prefix, of one of two kinds.

A version with the Go engine is copied, laid out as upstream's release is. Of an installed Ollama
that runs llama-server its tree of links is laid anew: only our library comes out of the cache, and
all else comes from what is installed.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

from ollama_tiering.errors import UsageError
from ollama_tiering.patchset import identity
from ollama_tiering.patchset.llama_server import installation, link_tree, links
from ollama_tiering.patchset.llama_server.installation import IMPLEMENTATION, InstalledOllama
from ollama_tiering.patchset.llama_server.link_tree import RECORD, LinkTree
from ollama_tiering.systemd.manifest import NewFile


def tree_with(binary: Path) -> tuple[LinkTree, InstalledOllama] | None:
    """The tree that has this `ollama`, and what it was made for; None for the Go engine. UsageError
    for a tree of something that is not installed now, and for an Ollama without one.
    """
    tree = link_tree.of_binary(binary)
    if tree is None:
        if installation.at(binary) and not identity.build_id_of(binary):
            raise UsageError(
                f"{binary} runs llama-server and is not patched",
                hint="`tiering patch` makes one of it, and prints its path",
            )
        return None
    found = installation.at(Path(tree.program))
    if why := tree.why_stock(found):
        raise UsageError(why, hint="run `tiering patch` first")
    assert found is not None
    return tree, found


def tree_files(
    tree: LinkTree, found: InstalledOllama, stock: Path, folder: Path
) -> Iterator[NewFile]:
    """A tree in `folder`; `stock` is how the installed `ollama` is started."""
    library = tree.lib / IMPLEMENTATION
    exact = tree.lib / links.EXACT if tree.exact else None
    given = (found, tree.state, tree.version, library, tree.refused, exact)
    for entry in links.entries(*given):
        if entry.source is None:
            yield NewFile(folder / entry.path, 0o755, content=entry.text.encode())
        elif entry.is_link:
            yield NewFile(folder / entry.path, link=str(entry.source))
        elif entry.source in (library, exact):  # out of somebody's cache
            yield NewFile(folder / entry.path, 0o755, source=entry.source, owners=_callers())
        else:
            yield NewFile(folder / entry.path, 0o755, source=entry.source.resolve())
    own = replace(tree, program=str(stock), parts=[])  # the manifest says what lies there
    yield NewFile(folder / RECORD, content=link_tree.text_of(own).encode())


def _callers() -> tuple[int, ...]:
    """For root, itself and whoever called sudo; for others nobody in particular: they could read
    the file anyway.
    """
    if os.geteuid():
        return ()
    caller = os.environ.get("SUDO_UID", "")
    return (0, int(caller)) if caller.isascii() and caller.isdigit() else (0,)


def go_files(named: Path, place: Path) -> Iterator[NewFile]:
    """bin/ollama and lib/ollama beside each other."""
    binary = named.resolve()
    if not binary.is_file() or not os.access(binary, os.X_OK):
        raise UsageError(f"{named} is not a program", hint="build one: tiering patch")
    yield NewFile(place / "bin" / "ollama", 0o755, source=binary, owners=_callers())
    for libraries in (binary.parent / "build/lib/ollama", binary.parent.parent / "lib/ollama"):
        if libraries.is_dir():
            yield from _libraries(libraries, place / "lib" / "ollama")
            return


def _libraries(source: Path, target: Path) -> Iterator[NewFile]:
    """A link to a name beside it stays one. What another link leads to is copied: libraries of an
    installed Ollama that stay where they are.
    """
    for path in sorted(source.rglob("*")):
        place = target / path.relative_to(source)
        if path.is_symlink() and len(path.readlink().parts) == 1:
            yield NewFile(place, link=str(path.readlink()))
        elif path.is_file():
            yield NewFile(place, None, source=path.resolve(), owners=_callers())
