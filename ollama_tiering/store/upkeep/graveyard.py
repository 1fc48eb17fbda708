"""Keeps tombstones: written before anything is removed, lifted when the block is gone from there,
or about to be stored there anew.

Thread-safe: the file is written by one thread at a time, and not with the store's lock held.
"""

from __future__ import annotations

import itertools
import logging
import threading
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Final

from ollama_tiering.store.block.key import BlockKey, NamespaceId
from ollama_tiering.store.books import changes, graves
from ollama_tiering.store.books.graves import Block, Grave, Graves
from ollama_tiering.store.books.state import Level, StoreState
from ollama_tiering.store.tiers.names import TOMBSTONES_NAME
from ollama_tiering.store.upkeep.index import IndexRow
from ollama_tiering.store.upkeep.lists_elsewhere import lists_elsewhere, remove_lists
from ollama_tiering.store.upkeep.making_room import room_for_list
from ollama_tiering.store.upkeep.tombstones import (
    keep_unreadable,
    load_tombstones,
    text_of_tombstones,
)
from ollama_tiering.system.durable_file import replace_file

log = logging.getLogger(__name__)

_TRY_AGAIN_SECONDS: Final = 60.0
_GRAVES_PER_HOLD: Final = 2000  # of the lock: look-ups must not wait for longer
_TOO_MANY: Final = "too many to be removed from a remote tier not seen yet, some stay there"


class Graveyard:
    """`home` is the level whose directory keeps the file. `absent` and `unseen` as of `Graves`."""

    def __init__(
        self,
        state: StoreState,
        home: Level,
        unseen: Iterable[IndexRow] = (),
        absent: Path | None = None,
    ) -> None:
        self._state = state
        self._home = home
        made = {(row.namespace, row.key): row.created for row in unseen}
        self.graves = Graves(state, made, absent)
        self._writing = threading.Lock()
        self._not_before = 0.0
        self._elsewhere: list[Path] = []  # taken over, and not written down in the right place yet
        self._kept_aside = False  # a file that could not be read, if there was one
        self.recorded = True  # whether the file has what it should

    @property
    def _path(self) -> Path | None:
        """Returns None if no tier is this host's own."""
        directory = self._home.tier.directory
        if directory is None or self._home.tier.is_shared:
            return None
        return directory / TOMBSTONES_NAME

    def load(self) -> None:
        """Call it before the remote tier is looked at for the first time. OSError passes."""
        if self._path is None:
            return
        self._elsewhere = lists_elsewhere(self._state, self._home, TOMBSTONES_NAME)
        found: dict[Grave, float] = {}
        for path in (self._path, *self._elsewhere):
            for grave, removed in load_tombstones(path).items():
                found[grave] = max(removed, found.get(grave, removed))
        graves.restore(self.graves, found)
        self.graves.changed = bool(self._elsewhere)

    def hide(self) -> None:
        """Takes what was removed out of the books of a tier that was only looked at."""
        graves.hide(self._state, self.graves)

    def unseen(self) -> dict[Block, float]:
        """What the index knows of a remote tier that was not looked at since the start."""
        found, too_many = graves.not_seen(self._state, self.graves)
        if too_many:
            log.warning("%s: blocks=%d", _TOO_MANY, too_many)
        return found

    def forget_unseen(self, buried: Iterable[Block]) -> None:
        """The index need not know of them any more, for their tombstones do."""
        changes.note_changes(self._state, [key for _, key in buried])

    def bury(self, blocks: Mapping[Block, float]) -> None:
        """Blocks and when they were made. Durably, as far as the disk allows: before the first of
        their files is unlinked.
        """
        if self.graves.directory is None or not blocks:
            return
        now, waiting = self._state.wall_clock(), iter(blocks.items())
        while part := list(itertools.islice(waiting, _GRAVES_PER_HOLD)):
            graves.bury(self._state, self.graves, part, now)
        self.flush(now=True)

    def make_way(self, namespace: NamespaceId, key: BlockKey) -> bool:
        """The block is about to be stored there anew: afterwards no tombstone is on the disk that
        a restart could hold against it. False where that cannot be written now.
        """
        graves.lift(self._state, self.graves, namespace, key)
        return self.flush(now=True)

    @property
    def survives_reboot(self) -> bool:
        return not self._home.tier.in_memory

    def flush(self, *, now: bool = False) -> bool:
        """Writes the file if it is not as it should be. False when that failed."""
        state = self._state
        with self._writing:
            if not now and state.clock() < self._not_before:
                return not graves.is_changed(state, self.graves)
            tombstones = graves.take_changed(state, self.graves)
            if tombstones is None:
                return True
            try:
                self._write(text_of_tombstones(tombstones))
            except OSError as error:
                log.error("tombstones not written: path=%s error=%s", self._path, error)
                graves.not_written(state, self.graves)
                self._not_before = state.clock() + _TRY_AGAIN_SECONDS
                self.recorded = False
            else:
                self.recorded = True
                remove_lists(self._elsewhere)
            return self.recorded

    def _write(self, text: str) -> None:
        """The file counts against the budget, but is written even where nothing may be evicted:
        a removal makes more room than it takes.
        """
        path, level, state = self._path, self._home, self._state
        if path is None:
            return
        with room_for_list(state, level, len(text)):
            if not self._kept_aside:
                keep_unreadable(path)
                self._kept_aside = True
            replace_file(path, text)
