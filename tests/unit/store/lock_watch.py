"""Sees what a thread does while it holds the store's lock: it must ask no disk, wait, or log."""

from __future__ import annotations

import builtins
import io
import logging
import mmap
import os
import sqlite3
import threading
import time
import traceback
from collections.abc import Callable
from types import TracebackType
from typing import Any, Final

import pytest

from ollama_tiering.store.books.state import StoreState
from ollama_tiering.store.tiers.daily_writes import DailyWrites
from ollama_tiering.store.tiers.space import FreeSpace

_ASKS: Final = """
    access chmod copy_file_range fdatasync fstat fsync ftruncate link listdir lstat mkdir open
    posix_fadvise posix_fallocate pread preadv pwrite read readlink readv remove rename
    replace rmdir scandir sendfile stat statvfs truncate unlink utime write
"""  # functions of os
_OTHERS: Final[tuple[tuple[Any, str], ...]] = (
    (builtins, "open"),
    (io, "open"),
    (mmap, "mmap"),
    (sqlite3, "connect"),
    (time, "sleep"),
    (threading.Condition, "wait"),  # for an event, or for what another thread does
    (logging.Logger, "callHandlers"),  # whoever reads the log may be slow
    (FreeSpace, "headroom_bytes"),
    (FreeSpace, "take"),  # while another thread asks the file system
    (DailyWrites, "charge"),
    (DailyWrites, "refund"),
)


class _Lock:
    """Stands for the store's lock, and knows in which thread it is held."""

    def __init__(self, holder: threading.local) -> None:
        self._lock = threading.Lock()
        self._holder = holder

    def acquire(self, blocking: bool = True, timeout: float = -1) -> bool:
        taken = self._lock.acquire(blocking, timeout)
        if taken:
            self._holder.holds = True
        return taken

    def release(self) -> None:
        self._holder.holds = False
        self._lock.release()

    def __enter__(self) -> None:
        self.acquire()

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.release()


def watch_lock(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """What is called, and from where, under the lock of any store that is opened from now on."""
    seen: list[str] = []
    holder = threading.local()
    begin = StoreState.__init__

    def watched_state(self: StoreState, *args: Any, **options: Any) -> None:
        begin(self, *args, **options)
        monkeypatch.setattr(self, "lock", _Lock(holder))

    def watched(name: str, call: Callable[..., Any]) -> Callable[..., Any]:
        def inner(*args: Any, **options: Any) -> Any:
            if getattr(holder, "holds", False):
                holder.holds = False  # for what is called below
                at = traceback.extract_stack(limit=4)[:-1]
                holder.holds = True
                seen.append(f"{name}: " + " > ".join(f"{f.filename}:{f.lineno}" for f in at))
            return call(*args, **options)

        return inner

    monkeypatch.setattr(StoreState, "__init__", watched_state)
    places = [(os, name) for name in _ASKS.split()]
    for owner, name in (*places, *_OTHERS):
        full_name = f"{owner.__name__}.{name}"
        monkeypatch.setattr(owner, name, watched(full_name, getattr(owner, name)))
    return seen
