"""Keeps tombstones: written before anything is removed, lifted when the block is gone from there,
or about to be stored there anew.

Thread-safe: the file is written by one thread at a time, and not with the store's lock held.
"""

from __future__ import annotations

import itertools
import logging
import math
import threading
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Final

from ollama_tiering.store.block.key import BlockKey, NamespaceId
from ollama_tiering.store.books.state import Level, StoreState
from ollama_tiering.store.books.tree import BlockRecord
from ollama_tiering.store.tiers.contract import TierKind
from ollama_tiering.store.tiers.names import TOMBSTONES_NAME
from ollama_tiering.store.upkeep.index import IndexRow
from ollama_tiering.store.upkeep.room import room_for_list
from ollama_tiering.store.upkeep.tombstones import (
    MAX_TOMBSTONES,
    Grave,
    keep_unreadable,
    load_tombstones,
    text_of_tombstones,
)
from ollama_tiering.system.durable_file import replace_file

log = logging.getLogger(__name__)

Block = tuple[NamespaceId, BlockKey]

_TRY_AGAIN_SECONDS: Final = 60.0
_GRAVES_PER_HOLD: Final = 2000  # of the lock: look-ups must not wait for longer
_TOO_MANY: Final = "too many to be removed from a remote tier not seen yet, some stay there"


class Graveyard:
    """`home` is the level whose directory keeps the file. `absent` is the directory of a remote
    tier that is configured but could not be opened: everything removed may lie there. `unseen` is
    what the index knows of a remote tier that was not looked at yet.
    """

    def __init__(
        self,
        state: StoreState,
        home: Level,
        unseen: Iterable[IndexRow] = (),
        absent: Path | None = None,
    ) -> None:
        self._state = state
        self._home = home
        self._remote = next((v for v in state.levels if v.tier.kind is TierKind.REMOTE), None)
        self._absent = absent if self._remote is None else None
        self._unseen = {(row.namespace, row.key): row.created for row in unseen}
        self._tombstones: dict[Grave, float] = {}  # under the store's lock
        self._changed = False  # since the file was written; under the store's lock
        self._writing = threading.Lock()
        self._not_before = 0.0
        self._kept_aside = False  # a file that could not be read, if there was one
        self.recorded = True  # whether the file has what it should

    @property
    def _path(self) -> Path | None:
        """None where no tier is this host's own."""
        directory, kind = self._home.tier.directory, self._home.tier.kind
        if directory is None or kind is TierKind.REMOTE:
            return None
        return directory / TOMBSTONES_NAME

    @property
    def _directory(self) -> str | None:
        found = self._remote.tier.directory if self._remote is not None else self._absent
        return str(found) if found is not None else None

    def load(self) -> None:
        """To be called before the remote tier is looked at for the first time. OSError passes."""
        if self._path is None:
            return
        self._tombstones = load_tombstones(self._path)
        if self._remote is not None and self._remote.shared is not None:
            for grave, since in self._tombstones.items():
                if grave.directory == self._directory:
                    self._remote.shared.doomed[grave.namespace, grave.key] = since

    def hide(self) -> None:
        """Takes what was removed out of the books of a tier that was only looked at."""
        state, level = self._state, self._remote
        if level is None or level.shared is not None:
            return
        with state.lock:
            for grave, since in self._tombstones.items():
                record = state.tree.get(grave.key)
                if record is None or level.index not in record.levels:
                    continue
                if grave.directory == self._directory and record.created <= since:
                    state.forget_copy(level, grave.key)

    def unseen(self) -> dict[Block, float]:
        """What the index knows of a remote tier that was not looked at since the start; not more
        than can be buried beside what is in the books.
        """
        state = self._state
        with state.lock:
            if self._remote is not None and self._remote.known:
                return {}
            found = {b: made for b, made in self._unseen.items() if b[1] not in state.tree}
            room = max(0, MAX_TOMBSTONES - len(self._tombstones) - len(state.tree) - 1)
        if len(found) > room:
            log.warning("%s: blocks=%d", _TOO_MANY, len(found) - room)
        return dict(itertools.islice(found.items(), room))

    def forget_unseen(self, buried: Iterable[Block]) -> None:
        """The index need not know of them any more, for their tombstones do."""
        with self._state.lock:
            self._state.index_changed.update(key for _, key in buried)

    @property
    def away(self) -> str:
        """Why the remote tier's blocks cannot be removed now; empty when they can. Lock held."""
        state, level = self._state, self._remote
        if level is None:
            return "it could not be opened" if self._absent is not None else ""
        if state.suspended(level):
            seconds = max(1, math.ceil(level.suspended_until - state.clock()))
            return f"it does not answer, and is tried again in {seconds} s"
        return "" if level.known else "it has not been looked at yet"

    def needed(self, record: BlockRecord) -> bool:
        """Whether a copy may lie on the remote tier. Lock held.

        On one that others use too that is always so: they may have stored it since the last look.
        """
        level = self._remote
        if level is None:
            return self._absent is not None
        return level.shared is not None or level.index in record.levels

    def full(self, more: int) -> bool:
        """Lock held."""
        return len(self._tombstones) + more >= MAX_TOMBSTONES

    def bury(self, blocks: Mapping[Block, float]) -> None:
        """Blocks and when they were made. Durably, as far as the disk allows: before the first of
        their files is unlinked.
        """
        directory, state = self._directory, self._state
        if directory is None or not blocks:
            return
        now, waiting = state.wall_clock(), iter(blocks.items())
        while part := list(itertools.islice(waiting, _GRAVES_PER_HOLD)):
            with state.lock:
                for (namespace, key), created in part:
                    removed = max(now, created)  # whatever this machine's clock says
                    self._tombstones[Grave(directory, namespace, key)] = removed
                    if self._remote is not None and self._remote.shared is not None:
                        self._remote.shared.doomed[namespace, key] = removed
                self._changed = True
        self.flush(now=True)

    def lift(self, namespace: NamespaceId, key: BlockKey) -> None:
        """The block is gone from there. Written with the next `flush`. Lock held."""
        directory = self._directory
        if directory is not None:
            found = self._tombstones.pop(Grave(directory, namespace, key), None)
            self._changed = self._changed or found is not None

    def make_way(self, namespace: NamespaceId, key: BlockKey) -> bool:
        """The block is about to be stored there anew: afterwards no tombstone is on the disk that
        a restart could hold against it. False where that cannot be written now.
        """
        with self._state.lock:
            self.lift(namespace, key)
        return self.flush(now=True)

    def left(self, blocks: Iterable[Block]) -> int:
        """How many of them have their tombstones still. Lock held."""
        directory = self._directory
        if directory is None:
            return 0
        return sum(Grave(directory, *block) in self._tombstones for block in blocks)

    @property
    def survives_reboot(self) -> bool:
        return not self._home.tier.in_memory

    def flush(self, *, now: bool = False) -> bool:
        """Writes the file if it is not as it should be. False when that failed."""
        state = self._state
        with self._writing:
            with state.lock:
                if not self._changed:
                    return True
                if not now and state.clock() < self._not_before:
                    return False
                tombstones, self._changed = self._tombstones.copy(), False
            try:
                self._write(text_of_tombstones(tombstones))
            except OSError as error:
                log.error("tombstones not written: path=%s error=%s", self._path, error)
                with state.lock:
                    self._changed = True
                    self._not_before = state.clock() + _TRY_AGAIN_SECONDS
                self.recorded = False
            else:
                self.recorded = True
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
