"""This process: its environment and its standard output."""

from __future__ import annotations

import os
import sys


def is_set(variable: str) -> bool:
    """Whether the environment gives it a value that is not empty."""
    return bool(os.environ.get(variable))


def silence_stdout() -> None:
    """The reader of our output has gone; keep the interpreter's last flush quiet."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
