"""Which `ollama` a start of the installed version takes: that of its tree of links, made now if
there is none yet; or the installed one as stock, because it is not what its tree was made for, or
because none can be made.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Final

import psutil

from ollama_tiering import extras
from ollama_tiering.errors import ResultDiffers, ServiceError, TieringError
from ollama_tiering.launch import record
from ollama_tiering.launch.llama_self_test import self_test
from ollama_tiering.patchset.llama_server import built
from ollama_tiering.patchset.llama_server import installation as installed
from ollama_tiering.patchset.llama_server.built import BuildRequest
from ollama_tiering.patchset.llama_server.installation import InstalledOllama
from ollama_tiering.patchset.llama_server.link_tree import LinkTree
from ollama_tiering.patchset.report import Report
from ollama_tiering.protocol.engine.wire import VERSION

_MADE: Final = "made.json"  # beside the tree's record


@dataclass(frozen=True, slots=True)
class _Made:
    """How a tree was made: by which request, and with which version of the engine's protocol."""

    named_source: str | None
    allow_untested: bool
    protocol: int

    @property
    def request(self) -> BuildRequest:
        return BuildRequest(self.named_source, self.allow_untested)


def make_tree(installation: InstalledOllama, request: BuildRequest, report: Report) -> LinkTree:
    """With its self-test. TieringError where it cannot be made."""
    installed.require_program(installation)
    if built.current(installation) is None:
        extras.need("models")  # the self-test makes one; said before anything is compiled
    tree = built.ensure(installation, request, self_test, report)
    made = _Made(request.named_source, request.allow_untested, VERSION)
    if _made(tree) is None:
        (tree.folder / _MADE).write_text(json.dumps(asdict(made)) + "\n", encoding="utf-8")
    return tree


def _made(tree: LinkTree) -> _Made | None:
    """None where it was not written down."""
    try:
        return _Made(**json.loads((tree.folder / _MADE).read_text(encoding="utf-8")))
    except (OSError, ValueError, TypeError):
        return None


def program_for(installation: InstalledOllama, report: Report) -> tuple[Path, str]:
    """The `ollama` to start, and why it can only be stock; empty where it is tiered. It always says
    one: where no tree can be made, the installed one serves.

    A tree of which an installed file was changed is never started: our library was compiled for
    the files that were there. One that an older `tiering` made for these files is, if the new one
    cannot be made; but not where the new one's self-test found other bits.
    """
    tree = built.tree_of(installation)
    if tree and (why := tree.why_stock(installation)):
        return installation.program, (
            f"{why}: end this, run `tiering patch`, then `tiering up` again"
        )
    made = _made(tree) if tree else None
    try:
        return make_tree(installation, made.request if made else BuildRequest(), report).binary, ""
    except (TieringError, OSError) as error:
        why = _in_one_line(error)
        sound = made is not None and made.protocol == VERSION
        sound = sound and not isinstance(error, ResultDiffers)
        if tree is not None and sound and tree.fits(installation):
            report.warn(f"{tree.binary}, which an older `tiering` made, is served: {why}")
            return tree.binary, ""
    return installation.program, f"{installation.program} cannot be patched: {why}"


def _in_one_line(error: TieringError | OSError) -> str:
    if isinstance(error, OSError):
        return str(error)
    return f"{error.message} ({error.hint})" if error.hint else error.message


def remove_trees(trees: Sequence[LinkTree]) -> None:
    """ServiceError, and nothing is removed, where a running `tiering up` serves from one of them:
    its next llama-server would not start.
    """
    for one in record.records():
        used = Path(one.binary) in {tree.binary for tree in trees}
        if used and one.pid and psutil.pid_exists(one.pid):
            raise ServiceError(
                f"`tiering up` (process {one.pid}) serves from {one.binary}",
                hint="end it first",
            )
    for tree in trees:
        shutil.rmtree(tree.folder)
