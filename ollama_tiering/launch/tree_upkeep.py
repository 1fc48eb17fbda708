"""What of trees of links nobody needs any more: older ones of the same installed Ollama, what is
left of unfinished ones, and llama.cpp's source for them.
"""

from __future__ import annotations

import contextlib
import shutil
from collections.abc import Sequence
from pathlib import Path

import psutil

from ollama_tiering.errors import MissingTool
from ollama_tiering.launch import record
from ollama_tiering.patchset.llama_server import built, source
from ollama_tiering.patchset.llama_server.link_tree import LinkTree
from ollama_tiering.patchset.lock import locked
from ollama_tiering.patchset.report import Report

_BUSY = "another `tiering patch` is at work"


def remove_superseded(tree: LinkTree, report: Report) -> None:
    """The other trees for the Ollama of `tree` go, but for those from which a `tiering up` serves,
    and so do the commits of llama.cpp that no tree is of any more.
    """
    with locked(built.folder() / "lock", _BUSY, report):
        running = [one for one in record.records() if one.pid and psutil.pid_exists(one.pid)]
        if not all(one.binary for one in running):
            return  # one is about to start, and nobody knows from which tree
        used = {Path(one.binary) for one in running}
        for other in built.trees():
            older = other.program == tree.program and other.folder != tree.folder
            if older and other.binary not in used:
                shutil.rmtree(other.folder)
                report.say(f"removed {other.folder}, which was made for {other.version} before")
        with contextlib.suppress(MissingTool):  # git, without which nothing was fetched now
            source.keep_only({one.pin for one in built.trees()}, report)


def rest_without(trees: Sequence[LinkTree]) -> list[Path]:
    """What of no use is left in the cache where these trees, and no others, are removed."""
    if {tree.folder for tree in built.trees()} - {tree.folder for tree in trees}:
        return []
    return [path for path in (*built.leftovers(), source.cache_folder()) if path.exists()]


def remove_rest(report: Report) -> None:
    """Removes all that `rest_without` names, if there is no tree any more."""
    with locked(built.folder() / "lock", _BUSY, report):
        if not built.trees():
            for path in built.leftovers():
                shutil.rmtree(path)
            source.keep_only((), report)
