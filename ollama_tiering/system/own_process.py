"""This process: its environment, and what it prints."""

from __future__ import annotations

import io
import os
import sys


def is_set(variable: str) -> bool:
    """Whether the variable has a value that is not empty."""
    return bool(os.environ.get(variable))


def colour() -> bool | None:
    """False where nothing is to be coloured (https://no-color.org, and terminals that know no
    colours); None: where the output is a terminal.
    """
    return False if is_set("NO_COLOR") or os.environ.get("TERM") == "dumb" else None


def print_in_any_encoding() -> None:
    """What the terminal's encoding lacks is printed as `\\u2026` from now on, instead of ending the
    command: characters that Latin-1 has not, and bytes of a path that are not UTF-8.
    """
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="backslashreplace")


def bytes_of(path: os.PathLike[str]) -> bytes:
    """Encodes a path as a program needs it: the system's own bytes."""
    return os.fsencode(path)


def silence_stdout() -> None:
    """Call it when the reader of our output has gone, so that the interpreter's last flush is
    silent.
    """
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
