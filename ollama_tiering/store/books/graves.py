"""Tombstones in the books: blocks a person removed that may still lie on the remote tier.

The methods of `Graves` expect the lock to be held; the functions take it.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Final, NamedTuple

from ollama_tiering.store.block.key import BlockKey, NamespaceId
from ollama_tiering.store.books.state import Doomed, Level, StoreState
from ollama_tiering.store.books.tree import BlockRecord

Block = tuple[NamespaceId, BlockKey]

MAX_TOMBSTONES: Final = 1 << 18


class Grave(NamedTuple):
    """The places where a removed block may still lie."""

    directory: str
    namespace: NamespaceId
    key: BlockKey


class Graves:
    """`absent` is the directory of a remote tier that is configured but could not be opened:
    everything removed may lie there. `unseen` is what the index knows of a remote tier that was not
    looked at yet, with when each block was made.
    """

    def __init__(
        self, state: StoreState, unseen: Mapping[Block, float], absent: Path | None
    ) -> None:
        self._state = state
        self.remote = next((v for v in state.levels if v.tier.is_shared), None)
        self.absent = absent if self.remote is None else None
        self.unseen = unseen
        self.tombstones: dict[Grave, float] = {}
        self.changed = False  # since they were written down

    @property
    def directory(self) -> str | None:
        """Directory of the remote tier; None if there is no such tier."""
        found = self.remote.tier.directory if self.remote is not None else self.absent
        return str(found) if found is not None else None

    @property
    def away(self) -> str:
        """Why the remote tier's blocks cannot be removed now; empty when they can."""
        level = self.remote
        if level is None:
            return "it could not be opened" if self.absent is not None else ""
        if self._state.suspended(level):
            seconds = max(1, math.ceil(level.suspended_until - self._state.clock()))
            return f"it does not answer, and is tried again in {seconds} s"
        return "" if level.known else "it has not been looked at yet"

    def needed(self, record: BlockRecord) -> bool:
        """Whether a copy may lie on the remote tier.

        On one that others use too that is always so: they may have stored it since the last look.
        """
        level = self.remote
        if level is None:
            return self.absent is not None
        return level.shared is not None or level.index in record.levels

    def full(self, more: int) -> bool:
        return len(self.tombstones) + more >= MAX_TOMBSTONES

    def lift(self, namespace: NamespaceId, key: BlockKey) -> None:
        """The block is gone from there."""
        if self.directory is not None:
            found = self.tombstones.pop(Grave(self.directory, namespace, key), None)
            self.changed = self.changed or found is not None

    def left(self, blocks: Iterable[Block]) -> int:
        """How many of them have their tombstones still."""
        directory = self.directory
        if directory is None:
            return 0
        return sum(Grave(directory, *block) in self.tombstones for block in blocks)


def restore(graves: Graves, tombstones: dict[Grave, float]) -> None:
    """Those of before the start. Nobody else uses the books yet."""
    graves.tombstones = tombstones
    if graves.remote is not None and graves.remote.shared is not None:
        for grave, since in tombstones.items():
            if grave.directory == graves.directory:
                graves.remote.shared.doomed[grave.namespace, grave.key] = since


def hide(state: StoreState, graves: Graves) -> None:
    """Takes what was removed out of the books of a tier that was only looked at."""
    level = graves.remote
    if level is None or level.shared is not None:
        return
    with state.lock:
        for grave, since in graves.tombstones.items():
            record = state.tree.get(grave.key)
            if record is None or level.index not in record.levels:
                continue
            if grave.directory == graves.directory and record.created <= since:
                state.forget_copy(level, grave.key)


def not_seen(state: StoreState, graves: Graves) -> tuple[dict[Block, float], int]:
    """What the index knows of a remote tier that was not looked at since the start, and when it was
    made: not more than can be buried beside what is in the books; how many more there are.
    """
    with state.lock:
        if graves.remote is not None and graves.remote.known:
            return {}, 0
        found = {b: made for b, made in graves.unseen.items() if b[1] not in state.tree}
        room = max(0, MAX_TOMBSTONES - len(graves.tombstones) - len(state.tree) - 1)
    return dict(itertools.islice(found.items(), room)), max(0, len(found) - room)


def bury(
    state: StoreState, graves: Graves, blocks: Sequence[tuple[Block, float]], now: float
) -> None:
    """Blocks and when they were made, removed now (Unix seconds)."""
    directory = graves.directory
    assert directory is not None
    with state.lock:
        for (namespace, key), created in blocks:
            removed = max(now, created)  # whatever this machine's clock says
            graves.tombstones[Grave(directory, namespace, key)] = removed
            if graves.remote is not None and graves.remote.shared is not None:
                graves.remote.shared.doomed[namespace, key] = removed
        graves.changed = True


def lift(state: StoreState, graves: Graves, namespace: NamespaceId, key: BlockKey) -> None:
    with state.lock:
        graves.lift(namespace, key)


def lift_removed(state: StoreState, graves: Graves, removed: Iterable[Doomed]) -> None:
    """Their files are gone: what lay on a remote tier was removed just now, by a tool that does it
    itself. On a shared tier its own thread does, later.
    """
    with state.lock:
        for one in removed:
            if one.level.tier.is_shared and one.level.shared is None:
                graves.lift(one.namespace, one.key)


def removed_there(
    state: StoreState, graves: Graves, level: Level, block: Block, removed: float | None
) -> None:
    """A shared tier's thread has done what was asked for, at that time by a person."""
    assert level.shared is not None
    doomed = level.shared.doomed
    with state.lock:
        if doomed.get(block, -1.0) == removed:
            del doomed[block]
            graves.lift(*block)


def waiting(state: StoreState, graves: Graves, buried: Iterable[Block]) -> tuple[str, int]:
    """Why the remote tier cannot be told now, or nothing; how many of these still lie there."""
    with state.lock:
        return graves.away, graves.left(buried)


def take_changed(state: StoreState, graves: Graves) -> dict[Grave, float] | None:
    """All of them, to be written down; None if nothing changed since."""
    with state.lock:
        if not graves.changed:
            return None
        graves.changed = False
        return graves.tombstones.copy()


def is_changed(state: StoreState, graves: Graves) -> bool:
    with state.lock:
        return graves.changed


def not_written(state: StoreState, graves: Graves) -> None:
    with state.lock:
        graves.changed = True
