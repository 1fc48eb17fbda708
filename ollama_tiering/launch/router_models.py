"""The llama-servers of a router: one for each model, started by a llama-server without a model.

A router that is to end first waits for the requests that it has passed on, and only then ends its
models. That may take longer than anybody waits for it, so its models are asked beside it.
"""

from __future__ import annotations

import contextlib
from typing import Final

import psutil

from ollama_tiering.errors import plain

_NAME: Final = "--alias"


def ask_to_end(router_pid: int) -> None:
    """Sends SIGTERM to each: it stores what it has, also of a prompt that is still computed. What
    else the server started, such as tools, is left to it.
    """
    with contextlib.suppress(psutil.Error, OSError):
        router = psutil.Process(router_pid)
        program = router.exe()
        for child in router.children():
            with contextlib.suppress(psutil.Error, OSError):
                if child.exe() == program:
                    child.terminate()


def name_of(pid: int) -> str:
    """Under which name a router is asked for that llama-server; empty for one that none started."""
    with contextlib.suppress(psutil.Error, OSError):
        model = psutil.Process(pid)
        router, words = model.parent(), model.cmdline()
        if router and router.exe() == model.exe() and _NAME in words[:-1]:
            return plain(words[words.index(_NAME) + 1])
    return ""
