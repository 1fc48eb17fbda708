"""The allocator of a process that runs for months."""

from __future__ import annotations

import ctypes
from typing import Final

_M_ARENA_MAX: Final = -8  # glibc, malloc.h


def share_one_arena() -> None:
    """All threads to come allocate from one arena of glibc's malloc; elsewhere nothing changes.

    By default each thread gets one of its own, up to eight for every core. What one thread
    allocates and another frees then leaves holes in all of them, and a sidecar under load grew
    without end (docs/design.md).
    """
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)  # musl has none
    if mallopt is not None:
        mallopt(_M_ARENA_MAX, 1)
