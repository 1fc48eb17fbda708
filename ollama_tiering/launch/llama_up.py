"""Which `ollama` a start of the installed version takes: that of its tree of links, made now if
there is none yet, or none for the files that are installed now; or, if none can be made, the
installed one as stock.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Final

from ollama_tiering.errors import ResultDiffers, ServiceError
from ollama_tiering.launch.self_test import self_test
from ollama_tiering.launch.unharmed import in_one_line
from ollama_tiering.patchset.llama_server import built, tree_use
from ollama_tiering.patchset.llama_server import installation as installed
from ollama_tiering.patchset.llama_server.built import BuildRequest
from ollama_tiering.patchset.llama_server.installation import InstalledOllama
from ollama_tiering.patchset.llama_server.link_tree import LinkTree
from ollama_tiering.patchset.lock import locked
from ollama_tiering.patchset.report import Report
from ollama_tiering.protocol.engine.wire import VERSION

PATIENCE_SECONDS: Final = 300.0  # as long as another `tiering patch` may take, and no longer
_TRIES: Final = 2
_MADE: Final = "made.json"  # beside the tree's record


@dataclass(frozen=True, slots=True)
class _Made:
    """How a tree was made: by which request, and with which version of the engine's protocol."""

    named_source: str | None
    protocol: int

    @property
    def request(self) -> BuildRequest:
        return BuildRequest(self.named_source)


def make_tree(installation: InstalledOllama, request: BuildRequest, report: Report) -> LinkTree:
    """Makes and tests it. TieringError if it cannot be made."""
    installed.require_program(installation)
    tree = built.ensure(installation, request, self_test, report)
    made = _Made(request.named_source, VERSION)
    if _made(tree) is None:
        (tree.folder / _MADE).write_text(json.dumps(asdict(made)) + "\n", encoding="utf-8")
    return tree


def named_source(binary: Path) -> str | None:
    """The source of llama.cpp that somebody named for the tree that has this `ollama`."""
    tree = built.tree_with(binary)
    made = _made(tree) if tree else None
    return made.named_source if made else None


def _made(tree: LinkTree) -> _Made | None:
    """Returns None if it was not written down. An older `tiering` may have noted more."""
    try:
        noted = json.loads((tree.folder / _MADE).read_text(encoding="utf-8"))
        return _Made(noted["named_source"], noted["protocol"])
    except (OSError, ValueError, TypeError, LookupError):
        return None


def program_for(installation: InstalledOllama, report: Report, uses: ExitStack) -> tuple[Path, str]:
    """The `ollama` to start, and why it can only be stock; empty where it is tiered. It always says
    one: where no tree can be made, whatever the reason, the installed one serves. The tree is not
    removed until `uses` ends.

    A tree of which an installed file was changed is never started: our library was compiled for
    the files that were there. One that an older `tiering` made for these files is, if the new one
    cannot be made; but not where the new one's self-test found other bits.
    """
    tree: LinkTree | None = None
    try:
        tree = built.tree_of(installation)
        if tree and (why := tree.why_stock(installation)):
            report.say(f"{why}: it is patched again")
        made = _made(tree) if tree else None
        request = replace(made.request if made else BuildRequest(), patience=PATIENCE_SECONDS)
        return _held_tree(installation, request, report, uses).binary, ""
    except Exception as error:  # whatever it is, Ollama must start
        why = in_one_line(error)
        older = None if isinstance(error, ResultDiffers) else tree
        if older and _still_serves(older, installation) and tree_use.hold(older.folder, uses):
            report.warn(f"{older.binary}, which an older `tiering` made, is served: {why}")
            return older.binary, ""
    return installation.program, f"{installation.program} cannot be patched: {why}"


def _held_tree(
    installation: InstalledOllama, request: BuildRequest, report: Report, uses: ExitStack
) -> LinkTree:
    """Made, and made again if it is removed before it is held."""
    for _ in range(_TRIES):
        tree = make_tree(installation, request, report)
        if tree_use.hold(tree.folder, uses):
            return tree
    raise ServiceError(f"{tree.folder} is removed again and again", hint="see by whom")


def _still_serves(tree: LinkTree, installation: InstalledOllama) -> bool:
    """Whether one that an older `tiering` made can be started, and speaks to today's sidecar."""
    made = _made(tree)
    return made is not None and made.protocol == VERSION and tree.fits(installation)


def remove_trees(trees: Sequence[LinkTree], report: Report) -> None:
    """ServiceError, and nothing is removed, where somebody serves from one of them."""
    with locked(built.folder() / "lock", built.BUSY, report):
        tree_use.remove_all([tree.folder for tree in trees])
