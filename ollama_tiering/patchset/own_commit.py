"""Which commit this program is of: a version alone says little of what runs from a checkout or a
git URL.
"""

from __future__ import annotations

import contextlib
import json
from importlib import metadata
from pathlib import Path

from ollama_tiering.errors import MissingTool
from ollama_tiering.patchset.run import run

CHECKOUT = Path(__file__).parents[2]
_PACKAGE = "ollama-tiering"


def commit_of(root: Path, *besides: str) -> str:
    """Of the checkout there: `1a2b3c4d`, or `1a2b3c4d with changes` if files of it that lie outside
    of `besides` were changed. Empty if there is none, or no git.
    """
    if not (root / "patches").is_dir():  # an installed package may lie in someone else's checkout
        return ""
    changes = ("status", "--porcelain", "--", ".", *(f":(exclude){path}" for path in besides))
    try:
        commit = run("git", "rev-parse", "--short", "HEAD", cwd=root)
        changed = run("git", *changes, cwd=root)
    except MissingTool:
        return ""
    if commit.returncode:
        return ""
    return commit.stdout.strip() + (" with changes" if changed.stdout.strip() else "")


def commit() -> str:
    """Of this program: its checkout's, or that of the git URL that it was installed from (PEP 610);
    empty if neither tells.
    """
    if found := commit_of(CHECKOUT):
        return found
    with contextlib.suppress(metadata.PackageNotFoundError, ValueError, KeyError, TypeError):
        told = json.loads(metadata.distribution(_PACKAGE).read_text("direct_url.json") or "")
        return str(told["vcs_info"]["commit_id"])[:8]
    return ""
