"""Copies that a client cannot read as they are, brought to where it can, before it is told of them.

A client maps or reads raw block files. What a tier holds encoded is decoded into the fastest tier
that takes raw blocks and has room; several blocks at a time, so that decoding overlaps reading.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Final

from ollama_tiering.store.encoding import Encoding
from ollama_tiering.store.report import LeasedBlock
from ollama_tiering.store.state import Level, StoreState
from ollama_tiering.store.tier import TierKind
from ollama_tiering.store.tree import BlockRecord

WORKERS: Final = max(2, min(4, os.cpu_count() or 1))

CopyBlock = Callable[[BlockRecord, Level, Level], bool]  # from, to; False: it is not there


def readable_by_client(level: Level, record: BlockRecord) -> bool:
    """Whether the copy at this level can be given to a client as it is."""
    return level.index not in record.encoded


class Staging:
    """Thread-safe. Records given to it are pinned by the caller."""

    def __init__(self, state: StoreState, copy: CopyBlock) -> None:
        self._state = state
        self._copy = copy
        self._pool = ThreadPoolExecutor(WORKERS, thread_name_prefix="block-staging")

    def make_readable(self, records: Sequence[BlockRecord], deadline: float) -> None:
        """Stages what needs it, from the first on; ends at the first that cannot be, or when the
        (clock) deadline has passed. What is left unreadable is a miss for the caller.
        """
        state = self._state
        with state.lock:
            needy = [r for r in records if r.levels and not _readable_levels(state, r)]
        if not needy:
            return
        ended = threading.Event()

        def one(record: BlockRecord) -> None:
            if not ended.is_set() and (state.clock() >= deadline or self.stage(record) is None):
                ended.set()

        list(self._pool.map(one, needy))

    def stage(self, record: BlockRecord) -> Level | None:
        """Copies the block into the fastest level with room, and returns that; None: it cannot be.

        A second caller for the same block waits for the first.
        """
        state = self._state
        with state.lock:
            running = state.staging.get(record.key)
            if running is None:
                state.staging[record.key] = threading.Event()
        if running is not None:
            running.wait()
            with state.lock:
                readable = _readable_levels(state, record)
            return readable[0] if readable else None
        try:
            return self._stage(record)
        finally:
            with state.lock:
                done = state.staging.pop(record.key)
            done.set()

    def close(self) -> None:
        self._pool.shutdown()

    def _stage(self, record: BlockRecord) -> Level | None:
        state = self._state
        with state.lock:
            readable = _readable_levels(state, record)
            if readable or not record.levels:
                return readable[0] if readable else None
            source = state.levels[state.nearest(record, state.speeds())[0]]
            targets = [
                level
                for level in state.levels
                if level.index not in record.levels
                and level.tier.kind is not TierKind.REMOTE
                and state.codec.of(level) is Encoding.NONE
                and not state.suspended(level)
            ]
        for target in targets:
            if self._copy(record, source, target):
                with state.lock:
                    target.stats.promoted_blocks += 1
                return target
        return None


def locate(state: StoreState, record: BlockRecord) -> LeasedBlock | None:
    """The nearest readable copy whose file is there. Called without the lock, the block pinned."""
    for index in sorted(record.levels):
        level = state.levels[index]
        if not readable_by_client(level, record):
            continue
        try:
            if level.tier.exists(record.namespace, record.key):
                return LeasedBlock(
                    record.key,
                    record.namespace,
                    level.tier.kind,
                    level.tier.path(record.namespace, record.key),
                    record.file_bytes,
                )
        except OSError as error:
            with state.lock:
                state.failed(level, error, "lookup")
                state.counters.miss("i/o error")
            continue
        with state.lock:
            state.forget_copy(level, record.key)
            state.counters.miss("file gone")
    if record.encoded:
        with state.lock:
            state.counters.miss("not decoded")
    return None


def _readable_levels(state: StoreState, record: BlockRecord) -> list[Level]:
    """Fastest first. Lock held."""
    levels = (state.levels[index] for index in sorted(record.levels))
    return [level for level in levels if readable_by_client(level, record)]
