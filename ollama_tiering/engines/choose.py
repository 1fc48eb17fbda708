"""Which engine runs, and why: a binary that is named, one that can be built without fetching, or
the numpy engine.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from ollama_tiering.errors import TieringError
from ollama_tiering.patchset import finished
from ollama_tiering.patchset.binary import ENV_BINARY, named_binary

OLLAMA, REFERENCE, AUTO = "ollama", "reference", "auto"


@dataclass(frozen=True, slots=True)
class Choice:
    """`binary` is None for the reference engine."""

    binary: Path | None
    why: str

    @property
    def engine(self) -> str:
        return OLLAMA if self.binary else REFERENCE


def stock_beside(binary: Path) -> Path | None:
    """The newest finished build of the same version and kind without our patches, if there is
    one.
    """
    folder = finished.folder_of(binary)
    found = finished.programs(f"{folder.parent.name}{finished.STOCK}") if folder else []
    return next((finished.hold(one) for one in found if os.access(one, os.X_OK)), None)


def choose(wanted: str, *, source_cached: Callable[[], bool], build: Callable[[], Path]) -> Choice:
    """`build` gives the binary, at once if it is up to date. With `auto`, a failure of it leads to
    the numpy engine and is no error.
    """
    if wanted == REFERENCE:
        return Choice(None, "asked for")
    if binary := named_binary():
        return Choice(binary, f"{ENV_BINARY} names it")
    if wanted == OLLAMA:
        return Choice(build(), "asked for")
    if not source_cached():
        return Choice(
            None, "Ollama's source is not in the source cache; `tiering fetch` puts it there"
        )
    try:
        return Choice(build(), "built from the cached source")
    except TieringError as error:
        reason = error.message.splitlines()[0]
        cure = f" ({error.hint})" if error.hint else ""
        return Choice(None, f"Ollama could not be built: {reason}{cure}")
