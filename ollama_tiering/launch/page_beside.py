"""The page of `tiering web` beside `tiering up`: a process of its own, which ends with it."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Final

from ollama_tiering import config
from ollama_tiering.errors import ServiceError
from ollama_tiering.launch.process import Child, package_path, rotate, start, wait_ready

SAID: Final = "page: "  # how the command says its address, in its first line
_START_SECONDS: Final = 10.0
_STOP_SECONDS: Final = 5.0


@contextlib.contextmanager
def page_beside(listen: str, socket: Path, env: Mapping[str, str]) -> Iterator[Child]:
    """Starts it, and does not wait until it serves. `listen`: HOST:PORT; `socket`: the sidecar's,
    which may come later.
    """
    child = start(
        "the page",
        *(sys.executable, "-m", "ollama_tiering", "web"),
        *("--listen", listen, "--socket", socket),
        log=rotate(config.state_dir() / "logs" / "web.log"),
        env={**package_path(), **env},
        leashed=True,
    )
    try:
        yield child
    finally:
        child.stop(seconds=_STOP_SECONDS)


def address_of_page(child: Child) -> str:
    """Waits until it serves. ServiceError with its own words if it does not."""
    try:
        wait_ready(child, lambda: bool(_said(child, SAID)), seconds=_START_SECONDS)
    except ServiceError as error:
        if cause := _said(child, "error: "):
            raise ServiceError(cause, hint=_said(child, "hint: ") or error.hint) from None
        raise
    return _said(child, SAID)


def _said(child: Child, beginning: str) -> str:
    lines = (line.strip() for line in child.tail().splitlines())
    found = (line.removeprefix(beginning) for line in lines if line.startswith(beginning))
    return next(found, "")
