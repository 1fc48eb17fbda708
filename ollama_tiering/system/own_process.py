"""This process: its environment and its standard output."""

from __future__ import annotations

import os
import sys


def is_set(variable: str) -> bool:
    """Whether the variable has a value that is not empty."""
    return bool(os.environ.get(variable))


def silence_stdout() -> None:
    """To be called when the reader of our output has gone, so that the interpreter's last flush is
    silent.
    """
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
