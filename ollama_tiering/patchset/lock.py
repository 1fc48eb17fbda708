"""One process at a time, by a lock on a file that stays. The lock ends with the process, however
that ends.
"""

from __future__ import annotations

import fcntl
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from ollama_tiering.patchset.report import Report


@contextmanager
def locked(path: Path, busy: str, report: Report) -> Iterator[None]:
    """Holds the lock at `path`. While another process has it, says `busy` once and waits."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("a") as handle:
        try:
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            report.say(f"{busy}; waiting for it")
            fcntl.flock(handle, fcntl.LOCK_EX)
        yield
