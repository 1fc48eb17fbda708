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
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Final

from ollama_tiering import config
from ollama_tiering.errors import BuildError, TieringError, UnsupportedUpstream, UsageError
from ollama_tiering.patchset.llama_server import compile as compiling
from ollama_tiering.patchset.llama_server import (
    exact_library,
    exact_processor,
    guard,
    hooks,
    link_tree,
    links,
    parts,
    pins,
    source,
    tree_use,
)
from ollama_tiering.patchset.llama_server.exact_library import ExactAttention
from ollama_tiering.patchset.llama_server.installation import (
    AUTO,
    SERVER,
    InstalledOllama,
    find,
    usual_name,
)
from ollama_tiering.patchset.llama_server.link_tree import FORMAT, RECORD, LinkTree
from ollama_tiering.patchset.llama_server.outcome import SelfTestOutcome
from ollama_tiering.patchset.llama_server.tree import patch_tree
from ollama_tiering.patchset.llama_server.tree_use import UNFINISHED
from ollama_tiering.patchset.lock import locked
from ollama_tiering.patchset.report import Report
from ollama_tiering.patchset.tree import disk_full
from ollama_tiering.system.directories import sync_directory

BUSY: Final = "another `tiering patch` is at work"

SelfTest = Callable[[InstalledOllama, InstalledOllama, bool, Report], SelfTestOutcome]
"""(installed, tree, all checks, report): raises where the tree does not do what it must."""


@dataclass(frozen=True, slots=True)
class BuildRequest:
    """`named_source` is --llama-source; None: llama.cpp's own repository. `patience`: for so many
    seconds another process at work is waited for; None: until it has ended.
    """

    named_source: str | None = None
    jobs: int | None = None
    patience: float | None = None


def folder() -> Path:
    return config.cache_dir() / link_tree.CACHED


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
    return link_tree.below(folder())


def leftovers() -> list[Path]:
    """Folders of trees whose record is damaged or of another format, and of unfinished ones."""
    whole = {tree.folder for tree in trees()}
    other = [path.parent for path in link_tree.records(folder()) if path.parent not in whole]
    return sorted({*other, *folder().glob(f"{UNFINISHED}*")})


def tree_of(installation: InstalledOllama) -> LinkTree | None:
    """The latest one for it, whether that still fits or not; one that fits comes first."""
    own = [tree for tree in trees() if tree.is_of(installation)]
    return next((tree for tree in own if tree.fits(installation)), own[0] if own else None)


def tree_with(binary: Path) -> LinkTree | None:
    """The one that has this `ollama`."""
    return next((tree for tree in trees() if tree.binary == binary), None)


def trees_of(named: str) -> list[LinkTree]:
    """Those of the Ollama in a folder; with AUTO all of them, whatever is installed now."""
    if named == AUTO:
        return trees()
    found = find(named)
    return [tree for tree in trees() if tree.is_of(found)]


def current(installation: InstalledOllama) -> LinkTree | None:
    """The tree that `ensure` would return as it is."""
    wanted = (installation.state(), digest_of(default_sources()))
    own = [tree for tree in trees() if tree.is_of(installation)]
    return next(
        (
            tree
            for tree in own
            if (tree.state, tree.ours) == wanted
            and exact_processor.has_all(tree.processor)
            and _has_its_guard(tree, installation)
        ),
        None,
    )


def _has_its_guard(tree: LinkTree, installation: InstalledOllama) -> bool:
    """Not where `stat` is another one now, which writes a time in another way: the guard would
    start stock for ever.
    """
    try:
        wanted = guard.text(installation, tree.state, tree.version, tree.refused)
        return (tree.lib / SERVER).read_bytes() == os.fsencode(wanted)
    except (TieringError, OSError, ValueError):
        return False


def ensure(
    installation: InstalledOllama, request: BuildRequest, self_test: SelfTest, report: Report
) -> LinkTree:
    """The tree for what is installed now; made if it is not there. A tree that fails its test is
    not kept. One of a llama.cpp that is not tested here, or of which nobody can say so, has to pass
    all checks.
    """
    if done := current(installation):
        report.say(f"{done.binary} is up to date")
        return done
    state, ours = installation.state(), digest_of(default_sources())
    compiler = compiling.find_compiler()
    compiling.require_linkable(installation)
    version, build = installation.version(), installation.build()
    guard.text(installation, state, version)  # it is said now where there can be none
    pin = pins.pin_of(
        pins.load(), version, build, lambda commit: source.tag_of(commit, request.named_source)
    )
    decisive = [state, ours, compiler.identity, exact_processor.flags()]
    name = hashlib.sha256(json.dumps(decisive).encode()).hexdigest()[:12]
    target = folder() / f"{version}-{name}"
    with (
        locked(folder() / "lock", BUSY, report, seconds=request.patience),
        _full_disk_said(),
        _scratch() as work,
    ):
        if done := current(installation):  # that one made it
            return done
        found = source.obtain(pin.name, request.named_source, work / "source", report)
        try:
            doubt = pins.require_same(pin.name, build, found.commit)
        except UnsupportedUpstream:
            source.forget(pin.name)  # of a wrong source, it would be taken again from the right one
            raise
        is_tested = pin.is_tested and not doubt
        if not is_tested:
            why = doubt or f"llama.cpp {pin.name} is not on the list of tested ones"
            report.warn(f"{why}; all checks of the self-test have to show that it is right")
        patch_tree(found.folder, default_sources())
        library = compiling.compile_server(
            found.folder, installation, compiler, work, report, jobs=request.jobs
        )
        exact = exact_library.make(
            found.folder, installation, compiler, work, report, jobs=request.jobs
        )
        fresh = work / "tree"
        every = links.entries(installation, state, version, library, exact=exact.file)
        links.lay(fresh, every)
        made = InstalledOllama(fresh / links.PROGRAM, fresh / links.LIB)
        outcome = self_test(installation, made, not is_tested, report)
        if outcome.refused:
            links.write_guard(made.server, installation, state, version, outcome.refused)
        if installation.state() != state:
            raise BuildError(f"{installation.lib} was changed meanwhile", hint="try it again")
        program = str(usual_name(installation.program, on_path=True))
        not_exact = _keep_exact(fresh, exact, outcome, report)
        tested = (is_tested, outcome.checks, dict(outcome.refused))
        tree = LinkTree(target, program, version, pin.name, state, ours, *tested)
        tree = replace(
            tree,
            exact="" if not_exact else exact.words,
            not_exact=not_exact,
            processor=exact.processor,
            parts=parts.of(fresh, installation),
        )
        (fresh / RECORD).touch(0o600)  # it is locked later
        (fresh / RECORD).write_text(link_tree.text_of(tree), encoding="utf-8")
        parts.make_durable(fresh)
        if os.path.lexists(target):  # damaged, or of another program with the same files
            tree_use.put_away(target)
        fresh.rename(target)
        sync_directory(folder())
    return tree


def _keep_exact(tree: Path, exact: ExactAttention, outcome: SelfTestOutcome, report: Report) -> str:
    """Why the tree has no exact attention; empty where it has. One that failed its test goes."""
    if exact.file and not outcome.not_exact:
        return ""
    (tree / links.LIB / links.EXACT).unlink(missing_ok=True)
    why = outcome.not_exact or exact.words
    report.warn(f"attention on the CPU stays stock's: {why}")
    return why


@contextlib.contextmanager
def _scratch() -> Iterator[Path]:
    """A folder that goes with the context. What a killed process left goes now; nobody else is at
    work.
    """
    for left in folder().glob(f"{UNFINISHED}*"):
        shutil.rmtree(left, ignore_errors=True)
    with tempfile.TemporaryDirectory(dir=folder(), prefix=UNFINISHED) as scratch:
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
    files = sorted(path for path in sources.rglob("*") if path.is_file())
    ours = [(str(path.relative_to(sources)), path.read_bytes()) for path in files]
    for name, content in (*ours, *exact_library.sources()):
        for part in (os.fsencode(name), content):
            state.update(len(part).to_bytes(8, "little") + part)
    return state.hexdigest()
