"""The llama-servers of a router: one for each model, started by a llama-server without a model.

A router that is to end first waits for the requests that it has passed on, and only then ends its
models. That may take longer than anybody waits for it, so its models are asked beside it.
"""

from __future__ import annotations

import contextlib

import psutil


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
