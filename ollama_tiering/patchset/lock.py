"""One process at a time, by a lock on a file that stays. The lock ends with the process, however
that ends.
"""

from __future__ import annotations

import fcntl
import os
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Final

from ollama_tiering.errors import ServiceError
from ollama_tiering.patchset.report import Report
from ollama_tiering.system.locks import open_to_lock

_LOOK_SECONDS: Final = 0.2


@contextmanager
def locked(
    path: Path, busy: str, report: Report, *, seconds: float | None = None
) -> Iterator[None]:
    """Holds the lock at `path`. While another process has it, says `busy` once and waits;
    ServiceError after so many seconds, where they are given: that process may be suspended.
    """
    with os.fdopen(open_to_lock(path), "r+b") as handle:
        try:
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            report.say(f"{busy}; waiting for it")
            if seconds is None:
                fcntl.flock(handle, fcntl.LOCK_EX)
            elif not _locked_within(handle.fileno(), seconds):
                raise ServiceError(
                    f"{busy}, and has not ended within {seconds:.0f} s",
                    hint=f"see whether it is suspended: fuser -v {path}",
                ) from None
        yield


def _locked_within(handle: int, seconds: float) -> bool:
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline:
        try:
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            time.sleep(_LOOK_SECONDS)
        else:
            return True
    return False
