"""What a running llama-server was started with, from its command line. The Go engines report it."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from typing import Final

import psutil

from ollama_tiering.store import block_store_pb2 as pb

_CONTEXT: Final = ("-c", "--ctx-size")
_SLOTS: Final = ("-np", "--parallel")
_BATCH: Final = ("-b", "--batch-size")
_THREADS: Final = ("-t", "--threads")
_MOST: Final = (1 << 32) - 1


def settings_of(pid: int) -> pb.RunnerSettings:
    """What is not known stays 0."""
    try:
        return settings_in(psutil.Process(pid).cmdline())
    except (psutil.Error, OSError, ValueError):
        return pb.RunnerSettings()


def settings_in(command: Sequence[str]) -> pb.RunnerSettings:
    """What the command does not name stays 0."""
    slots = _number(command, _SLOTS)
    return pb.RunnerSettings(
        context_tokens=_number(command, _CONTEXT) // max(1, slots),
        slots=slots,
        batch_tokens=_number(command, _BATCH),
        threads=_number(command, _THREADS),
    )


def _number(command: Sequence[str], names: Sequence[str]) -> int:
    """The last one counts, as for llama-server."""
    found = 0
    for word, value in pairwise(command):
        if word in names and value.isdecimal():
            found = min(int(value), _MOST)
    return found
