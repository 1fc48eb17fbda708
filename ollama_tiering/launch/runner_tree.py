"""The tree of links that a llama-server was started from, for whoever shows what runs."""

from __future__ import annotations

from pathlib import Path

import psutil

from ollama_tiering.patchset.llama_server import link_tree


def engine_of(pid: int) -> str:
    """Which llama.cpp that process is of, and how far it is tested, in words; empty for one of no
    tree, or of another user.
    """
    try:
        program = Path(psutil.Process(pid).exe())
    except (psutil.Error, OSError):
        return ""
    tree = link_tree.of_server(program)
    return tree.engine if tree else ""
