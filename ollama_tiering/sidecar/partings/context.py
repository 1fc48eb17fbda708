"""How many tokens a slot of a running engine has room for, where its command line says so: that of
llama-server does, in Ollama from v0.30 on. The Go engine hears it later, and is not asked.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from typing import Final

import psutil

_CONTEXT: Final = ("-c", "--ctx-size")
_SLOTS: Final = ("-np", "--parallel")


def context_of(pid: int) -> int:
    """0 where it is not known."""
    try:
        return context_in(psutil.Process(pid).cmdline())
    except (psutil.Error, OSError, ValueError):
        return 0


def context_in(command: Sequence[str]) -> int:
    """The context of one slot; 0 where the command does not name it."""
    context, slots = _number(command, _CONTEXT), _number(command, _SLOTS)
    return context // max(1, slots)


def _number(command: Sequence[str], names: Sequence[str]) -> int:
    found = 0
    for word, value in pairwise(command):
        if word in names and value.isdecimal():
            found = int(value)
    return found
