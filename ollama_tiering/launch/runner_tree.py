"""The tree of links that a llama-server was started from, for whoever shows what runs."""

from __future__ import annotations

from pathlib import Path

import psutil

from ollama_tiering.patchset.llama_server import guard, link_tree, links


def engine_of(pid: int) -> str:
    """Which llama.cpp that process is of, and how far it is tested, in words; empty for one of no
    tree, or of another user.
    """
    try:
        program = Path(psutil.Process(pid).exe())
    except (psutil.Error, OSError):
        return ""
    folder = program.parents[len(links.LIB.parts)] if len(program.parents) > 3 else None
    if folder is None or program != folder / links.LIB / guard.COPY:
        return ""
    tree = link_tree.read(folder)
    return tree.engine if tree else ""
