"""One process at a time over a file that stays; the lock goes with the process, however it ends."""

from __future__ import annotations

import fcntl
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from ollama_tiering.patchset.report import Report


@contextmanager
def locked(path: Path, busy: str, report: Report) -> Iterator[None]:
    """Hold the lock at `path`; while another process has it, say `busy` once and wait."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("a") as handle:
        try:
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            report.say(f"{busy}; waiting for it")
            fcntl.flock(handle, fcntl.LOCK_EX)
        yield
