"""Lists that were written beside another tier's blocks while the one that keeps them was away: they
are taken over, and removed once the list in its right place has what they say.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterable
from pathlib import Path

from ollama_tiering.store.books.state import Level, StoreState


def lists_elsewhere(state: StoreState, home: Level, name: str) -> list[Path]:
    """Files of that name in the directories of this host's other tiers."""
    found = []
    for level in state.levels:
        directory = level.tier.directory
        if level is home or directory is None or level.tier.is_shared:
            continue
        if (directory / name).exists():
            found.append(directory / name)
    return found


def remove_lists(paths: Iterable[Path]) -> None:
    for path in paths:
        with contextlib.suppress(OSError):
            path.unlink(missing_ok=True)
