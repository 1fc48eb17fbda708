"""This process: its environment, and what it prints."""

from __future__ import annotations

import io
import os
import sys


def is_set(variable: str) -> bool:
    """Whether the variable has a value that is not empty."""
    return bool(os.environ.get(variable))


def print_in_any_encoding() -> None:
    """What the terminal's encoding lacks is printed as `\\u2026` from now on, instead of ending the
    command: characters that Latin-1 has not, and bytes of a path that are not UTF-8.
    """
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="backslashreplace")


def silence_stdout() -> None:
    """To be called when the reader of our output has gone, so that the interpreter's last flush is
    silent.
    """
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
