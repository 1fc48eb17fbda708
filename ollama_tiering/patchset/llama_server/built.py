"""The trees of links in the cache, each with a record of what it was made from.

`<cache>/llama-server/<version>-<digest>/` has `bin`, `lib` and `tree.json`. The digest is of all
that decides the result. A tree is put in place whole, after its self-test.
"""

from __future__ import annotations

import contextlib
import errno
import hashlib
import json
import os
import shutil
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from ollama_tiering import config
from ollama_tiering.errors import BuildError, UnsupportedUpstream, UsageError
from ollama_tiering.patchset.llama_server import compile as compiling
from ollama_tiering.patchset.llama_server import guard, hooks, link_tree, links, pins, source
from ollama_tiering.patchset.llama_server.installation import AUTO, InstalledOllama, find
from ollama_tiering.patchset.llama_server.link_tree import FORMAT, RECORD, LinkTree
from ollama_tiering.patchset.llama_server.tree import patch_tree
from ollama_tiering.patchset.lock import locked
from ollama_tiering.patchset.report import Report
from ollama_tiering.patchset.tree import disk_full

_UNFINISHED: Final = ".building-"

SelfTest = Callable[[InstalledOllama, InstalledOllama, Report], None]
"""(installed, tree, report): raises where the tree does not do what it must."""


@dataclass(frozen=True, slots=True)
class BuildRequest:
    """`named_source` is --llama-source; None: llama.cpp's own repository."""

    named_source: str | None = None
    allow_untested: bool = False
    jobs: int | None = None


def folder() -> Path:
    return config.cache_dir() / "llama-server"


def default_sources() -> Path:
    """`llama_server/src` of the checkout, or the copy in an installed package."""
    package = Path(__file__).resolve().parents[2]
    checkout = package.parent / "llama_server" / "src"
    found = checkout if checkout.is_dir() else package / "_llama_server" / "src"
    if not found.is_dir():
        raise UsageError(f"{found}: no such folder", hint="install the package again")
    return found


def trees() -> list[LinkTree]:
    """All of the cache, the latest first."""
    records = sorted(folder().glob(f"*/{RECORD}"), key=lambda p: p.stat().st_mtime, reverse=True)
    return [tree for path in records if (tree := link_tree.read(path.parent))]


def leftovers() -> list[Path]:
    """Folders of trees whose record is damaged or of another format, and of unfinished ones."""
    whole = {tree.folder for tree in trees()}
    other = [path.parent for path in folder().glob(f"*/{RECORD}") if path.parent not in whole]
    return sorted({*other, *folder().glob(f"{_UNFINISHED}*")})


def tree_of(installation: InstalledOllama) -> LinkTree | None:
    """The latest one for it, whether that still fits or not; one that fits comes first."""
    own = [tree for tree in trees() if tree.program == str(installation.program)]
    return next((tree for tree in own if tree.fits(installation)), own[0] if own else None)


def tree_with(binary: Path) -> LinkTree | None:
    """The one that has this `ollama`."""
    return next((tree for tree in trees() if tree.binary == binary), None)


def trees_of(named: str) -> list[LinkTree]:
    """Those of the Ollama in a folder; with AUTO all of them, whatever is installed now."""
    if named == AUTO:
        return trees()
    program = str(find(named).program)
    return [tree for tree in trees() if tree.program == program]


def current(installation: InstalledOllama) -> LinkTree | None:
    """The tree that `ensure` would return as it is."""
    wanted = (str(installation.program), installation.state(), digest_of(default_sources()))
    return next((t for t in trees() if (t.program, t.state, t.ours) == wanted), None)


def ensure(
    installation: InstalledOllama, request: BuildRequest, self_test: SelfTest, report: Report
) -> LinkTree:
    """The tree for what is installed now; made if it is not there. A tree that fails its test is
    not kept.
    """
    if done := current(installation):
        report.say(f"{done.binary} is up to date")
        return done
    state, ours = installation.state(), digest_of(default_sources())
    compiler = compiling.find_compiler()
    compiling.require_linkable(installation)
    version, build = installation.version(), installation.build()
    untested = request.allow_untested
    pin = pins.pin_of(pins.load(), version, build, allow_untested=untested)
    name = hashlib.sha256(json.dumps([state, ours, compiler.identity]).encode()).hexdigest()[:12]
    target = folder() / f"{version}-{name}"
    with (
        locked(folder() / "lock", "another `tiering patch` is at work", report),
        _full_disk_said(),
        _scratch() as work,
    ):
        if done := current(installation):  # that one made it
            return done
        found = source.obtain(pin, request.named_source, work / "source", report)
        try:
            doubt = pins.require_same(pin, build, found.commit, allow_untested=untested)
        except UnsupportedUpstream:
            source.forget(pin)  # of a wrong source, it would be taken again from the right one
            raise
        if doubt:
            report.warn(doubt)
        patch_tree(found.folder, default_sources())
        library = compiling.compile_server(
            found.folder, installation, compiler, work, report, jobs=request.jobs
        )
        fresh = work / "tree"
        links.lay(fresh, links.entries(installation, state, version, library))
        self_test(installation, InstalledOllama(fresh / links.PROGRAM, fresh / links.LIB), report)
        if installation.state() != state:
            raise BuildError(f"{installation.lib} was changed meanwhile", hint="try it again")
        tree = LinkTree(target, str(installation.program), version, pin, state, ours)
        (fresh / RECORD).write_text(link_tree.text_of(tree), encoding="utf-8")
        if target.exists():  # damaged, or of another program with the same files
            shutil.rmtree(target)
        fresh.rename(target)
    return tree


@contextlib.contextmanager
def _scratch() -> Iterator[Path]:
    """A folder that goes with the context. What a killed process left goes now; nobody else is at
    work.
    """
    for left in folder().glob(f"{_UNFINISHED}*"):
        shutil.rmtree(left, ignore_errors=True)
    with tempfile.TemporaryDirectory(dir=folder(), prefix=_UNFINISHED) as scratch:
        yield Path(scratch)


@contextlib.contextmanager
def _full_disk_said() -> Iterator[None]:
    try:
        yield
    except OSError as error:
        if error.errno in (errno.ENOSPC, errno.EDQUOT):
            raise disk_full(folder()) from None
        raise


def digest_of(sources: Path) -> str:
    """Of all that is placed: our files, the lines in llama.cpp's, and the guard; and of how it is
    compiled.
    """
    how = (compiling.FLAGS, compiling.DEFINED, compiling.INCLUDED, compiling.LINKED, guard.SCRIPT)
    state = hashlib.sha256(f"{FORMAT} {hooks.HOOKS!r} {how!r}".encode())
    for path in sorted(path for path in sources.rglob("*") if path.is_file()):
        content = path.read_bytes()
        for part in (os.fsencode(path.relative_to(sources)), content):
            state.update(len(part).to_bytes(8, "little") + part)
    return state.hexdigest()
