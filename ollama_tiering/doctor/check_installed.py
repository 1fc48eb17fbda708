"""Which installed Ollama from v0.30 on there is, which tree `tiering up` would serve, and whether
one can be made.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Final

from ollama_tiering.doctor.check import Check, fail, ok, warn
from ollama_tiering.errors import TieringError, UnsupportedUpstream
from ollama_tiering.patchset.llama_server import built, compile, installation, pins
from ollama_tiering.patchset.llama_server.installation import InstalledOllama
from ollama_tiering.patchset.llama_server.link_tree import LinkTree

NAME: Final = "installed Ollama"
_ATTENTION: Final = "attention on the CPU"
_PROGRAM, _COMPILER = "version of Ollama", "C++ compiler"
NEEDS: Final = (_PROGRAM, _COMPILER)  # to make a tree


def checks(trees: Sequence[LinkTree], *, needed: bool) -> Iterator[Check]:
    """`needed`: nothing else is built, so that `tiering up` would look for an installed one."""
    for program in dict.fromkeys(tree.program for tree in trees):
        found = installation.at(Path(program))
        tree = built.tree_of(found) if found else None
        if found is None or tree is None:
            gone = f"{program}, for which a tree was made, is gone or not whole"
            forget = "install it again; or remove the tree: tiering patch revert --ollama auto"
            yield warn(NAME, gone, forget)
        else:
            yield from _of_tree(found, tree)
    if not trees:
        yield from _without_tree(needed=needed)


def _of_tree(found: InstalledOllama, tree: LinkTree) -> Iterator[Check]:
    program = found.program
    if not tree.fits(found):
        changed = f"{program} was updated or changed since it was patched as {tree.version}"
        yield warn(NAME, f"{changed}: `tiering up` serves it as stock", "tiering patch")
        yield from _needs(found)
        return
    tiered = f"{program}, {tree.version}, {tree.engine}: tiered by {tree.folder}"
    yield from _attention(tree)
    if built.current(found) is not None:
        yield ok(NAME, tiered)
        return
    older = "which an older `tiering` made, so `tiering up` makes it anew"
    yield ok(NAME, f"{tiered}, {older}")
    yield from _needs(found)


def _attention(tree: LinkTree) -> Iterator[Check]:
    if tree.exact and not tree.runs_exact:
        yield warn(_ATTENTION, tree.attention_here, "tiering patch")
    else:
        yield ok(_ATTENTION, tree.attention_here)


def _without_tree(*, needed: bool) -> Iterator[Check]:
    if found := installation.usual():
        finding = f"{found.program} runs llama-server and is not patched"
        if not needed:
            yield ok(NAME, finding)
            return
        yield warn(NAME, finding, "tiering patch")
        yield from _needs(found)
    elif needed:
        try:
            installation.require_none_broken()
        except UnsupportedUpstream as error:
            yield fail(NAME, error.message, error.hint or "")


def _needs(found: InstalledOllama) -> Iterator[Check]:
    """What making a tree asks for."""
    needs: tuple[tuple[str, Callable[[], str]], ...] = (
        (_PROGRAM, lambda: _pin(found)),
        (_COMPILER, lambda: compile.find_compiler().identity),
    )
    for name, look in needs:
        try:
            yield ok(name, look())
        except TieringError as error:
            yield fail(name, error.message, error.hint or "")


def _pin(found: InstalledOllama) -> str:
    installation.require_program(found)
    compile.require_linkable(found)
    version = found.version()
    pin = pins.pin_of(pins.load(), version, found.build(), tag_of=lambda commit: "")
    listed = "" if pin.is_tested else ", not on the list of tested ones: the self-test decides"
    return f"{version}, llama.cpp {pin.name}{listed}"
