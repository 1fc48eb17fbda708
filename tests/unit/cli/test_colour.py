"""Nothing is coloured where NO_COLOR or TERM=dumb ask for that, also on a terminal."""

from __future__ import annotations

import os
import pty
import subprocess
import sys
from pathlib import Path

import pytest

CODE = """
import ollama_tiering.doctor.examine as examining
from ollama_tiering.doctor.check import ok
examining.examine = lambda: [ok("python", "here")]
from ollama_tiering.cli import main
main(["doctor"])
"""


def on_a_terminal(**env: str) -> bytes:
    shown, terminal = pty.openpty()
    clean = {k: v for k, v in os.environ.items() if k not in ("NO_COLOR", "TERM", "FORCE_COLOR")}
    subprocess.run(
        [sys.executable, "-c", CODE],
        env={**clean, "TERM": "xterm", **env},
        stdout=terminal,
        stderr=terminal,
        check=True,
        cwd=Path(__file__).parents[3],
    )
    os.close(terminal)
    said = b""
    try:
        while data := os.read(shown, 1 << 16):
            said += data
    except OSError:  # the terminal has gone
        pass
    os.close(shown)
    assert b"python: here" in said
    return said


@pytest.mark.parametrize("env", [{"NO_COLOR": "1"}, {"TERM": "dumb"}, {"NO_COLOR": "0"}])
def test_it_is_plain(env: dict[str, str]) -> None:
    assert b"\x1b" not in on_a_terminal(**env)


@pytest.mark.parametrize("env", [{}, {"NO_COLOR": ""}])
def test_else_a_terminal_has_colours(env: dict[str, str]) -> None:
    assert b"\x1b[32mok" in on_a_terminal(**env)
