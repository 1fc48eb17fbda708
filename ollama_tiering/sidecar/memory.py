"""The memory allocator of a process that runs for months."""

from __future__ import annotations

import ctypes
from typing import Final

_M_ARENA_MAX: Final = -8  # glibc, malloc.h


def share_one_arena() -> None:
    """Makes all later threads allocate from one arena of glibc's malloc; elsewhere it does nothing.

    By default each thread gets an arena of its own, up to eight per core. What one thread allocates
    and another frees leaves holes in all of them, so a sidecar under load grew without end
    (docs/design.md).
    """
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)  # musl has none
    if mallopt is not None:
        mallopt(_M_ARENA_MAX, 1)
