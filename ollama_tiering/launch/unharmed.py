"""Whatever fails of ours, Ollama starts: it costs what failed, and one line."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator

from ollama_tiering.errors import TieringError


@contextlib.contextmanager
def unharmed(warn: Callable[[str], None], lost: str) -> Iterator[None]:
    """An error in its block ends the block, and is said with what it costs."""
    try:
        yield
    except Exception as error:  # whatever it is
        warn(f"{lost}: {in_one_line(error)}")


def in_one_line(error: Exception) -> str:
    """Cause and cure."""
    if isinstance(error, TieringError):
        cause = error.message.partition("\n")[0]  # the rest is the end of a log
        return f"{cause} ({error.hint})" if error.hint else cause
    said = str(error) if isinstance(error, OSError) else f"{type(error).__name__}: {error}"
    if isinstance(error, OSError):
        said += " (check that path, its owner and free space)"
    return " ".join(said.split())
