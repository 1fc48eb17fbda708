"""Directories of a tier with names that are new or gone, which a power cut could undo.

A file system makes a name durable when its directory is synced; here that is done for many names at
once. Thread-safe. A tier in memory is never synced.
"""

from __future__ import annotations

import contextlib
import itertools
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Final

from ollama_tiering.system.daemon_pool import DaemonPool
from ollama_tiering.system.directories import open_below
from ollama_tiering.system.lacking import sync

Place = tuple[str, ...]  # directories below the tier's

_SYNCS_AT_ONCE: Final = 4
_RECENT_SECONDS: Final = 300.0  # by then every file system has written its journal by itself


class UnsyncedNames:
    def __init__(self, directory: Path, *, in_memory: bool) -> None:
        self._directory = directory
        self._in_memory = in_memory
        self._new: dict[Place, int] = {}  # a number that changes with every name
        self._numbers = itertools.count()
        self._gone: set[Place] = set()
        self._threads = DaemonPool(_SYNCS_AT_ONCE, "sync")

    def added(self, place: Place) -> None:
        if not self._in_memory:
            self._new[place] = next(self._numbers)

    def removed(self, place: Place) -> None:
        if not self._in_memory:
            self._gone.add(place)

    def found(self, place: Place, changed: float) -> None:
        """Notes a directory that a start found, changed at that time (Unix seconds). Whoever
        changed it may have been killed before it synced.
        """
        if changed > time.time() - _RECENT_SECONDS:
            self.added(place)

    def sync(self, places: Sequence[Place] | None = None) -> None:
        """Makes new names durable, in all directories or in those of `places`. OSError passes; what
        failed is tried again at the next call.
        """
        new = list(self._new)
        wanted = new if places is None else [place for place in places if place in self._new]
        if len(wanted) == 1:
            self._sync(wanted[0])
        elif wanted:  # several at once: one commit of a journal does for all
            for done in [self._threads.submit(self._sync, place) for place in wanted]:
                done.result()

    def sync_removed(self) -> None:
        """Ensures that what was removed does not come back."""
        places = list(self._gone)
        for place in places:
            self._gone.discard(place)
            self.added(place)
        self.sync(places)

    def close(self) -> None:
        self._threads.close()

    def _sync(self, place: Place) -> None:
        before = self._new.get(place)
        with contextlib.suppress(FileNotFoundError), open_below(self._directory, place) as below:
            sync(below)
        if self._new.get(place) == before:  # else a new name came meanwhile, and needs another sync
            self._new.pop(place, None)
