"""The processor for which exact attention is compiled, by what Linux says of it.

`-march=native` may use all that the processor has. On another one, as after a move of the disk or
on a home that machines share, the library must not be taken: `llama_server/cpu/score.cpp` compares
the same words. A word too many costs speed, and one too few would be a crash: so all of them count.
"""

from __future__ import annotations

from pathlib import Path
from typing import Final

_INFO: Final = Path("/proc/cpuinfo")
_FLAGS: Final = "flags"  # of x86; on ARM the line has another name
_MOST_WORD_BYTES: Final = 63  # score.cpp


def flags() -> str:
    """Its flags, in order, with a space between two; empty where it has no such line."""
    try:
        text = _INFO.read_text(encoding="ascii", errors="replace")
    except OSError:
        return ""
    for line in text.splitlines():
        name, _, said = line.partition(":")
        if name.strip() == _FLAGS:
            return " ".join(sorted(set(said.split())))
    return ""


def has_all(wanted: str) -> bool:
    """Whether this processor has all that `flags` said of another one, or of itself."""
    return set(wanted.split()) <= set(flags().split())


def can_be_compared(said: str) -> bool:
    """Whether they can be put into a source, and found again."""
    return all(word.isascii() and len(word) <= _MOST_WORD_BYTES for word in said.split())
