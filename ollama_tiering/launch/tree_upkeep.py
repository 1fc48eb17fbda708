"""What of trees of links nobody needs any more: older ones of the same installed Ollama, those of
one that is gone, what is left of unfinished ones, and llama.cpp's source for them.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Sequence
from pathlib import Path

from ollama_tiering.errors import MissingTool
from ollama_tiering.patchset.llama_server import built, source, tree_use
from ollama_tiering.patchset.llama_server.link_tree import LinkTree
from ollama_tiering.patchset.lock import locked
from ollama_tiering.patchset.report import Report


def remove_superseded(tree: LinkTree, report: Report) -> None:
    """The other trees for the Ollama of `tree` go, and those of an Ollama that is gone, but for
    those from which somebody serves; and so do the commits of llama.cpp that no tree is of any
    more.
    """
    with locked(built.folder() / "lock", built.BUSY, report):
        for other in built.trees():
            gone = not os.path.lexists(other.program)
            if other.folder == tree.folder or not (gone or _same_program(tree, other)):
                continue
            if tree_use.remove_unused(other.folder):
                report.say(f"removed {other.folder}, which was made for {other.version} before")
        for left in built.leftovers():  # half of one, or of an older format
            if tree_use.remove_unused(left):
                report.say(f"removed {left}, which is no whole tree")
        with contextlib.suppress(MissingTool):  # git, without which nothing was fetched now
            source.keep_only({one.pin for one in built.trees()}, report)


def _same_program(tree: LinkTree, other: LinkTree) -> bool:
    """Compares by the name, or by what the name leads to."""
    return os.path.realpath(tree.program) == os.path.realpath(other.program)


def rest_without(trees: Sequence[LinkTree]) -> list[Path]:
    """What of no use is left in the cache where these trees, and no others, are removed."""
    if {tree.folder for tree in built.trees()} - {tree.folder for tree in trees}:
        return []
    return [path for path in (*built.leftovers(), source.cache_folder()) if path.exists()]


def remove_rest(report: Report) -> None:
    """Removes all that `rest_without` names, if there is no tree any more."""
    with locked(built.folder() / "lock", built.BUSY, report):
        if not built.trees():
            for path in built.leftovers():
                tree_use.remove_unused(path)
            source.keep_only((), report)
