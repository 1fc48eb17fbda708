"""What of a file is in the page cache, and how to ask for it not to be."""

from __future__ import annotations

import os
from typing import Final

_PAGE_BYTES: Final = 4096
_PROBES: Final = 8


def resident(fd: int, file_bytes: int) -> bool | None:
    """Probes pages with RWF_NOWAIT, which refuses to wait for a disk. None: partly, or not told."""
    nowait = getattr(os, "RWF_NOWAIT", None)
    if nowait is None or not file_bytes:
        return None
    page = bytearray(_PAGE_BYTES)
    present = 0
    for index in range(_PROBES):
        try:
            present += os.preadv(fd, [page], file_bytes * index // _PROBES, nowait) > 0
        except BlockingIOError:
            pass
        except OSError:
            return None
    return True if present == _PROBES else False if not present else None


def forget(fd: int) -> None:
    """Lets the system drop the clean pages of a file; those somebody has mapped stay."""
    os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
