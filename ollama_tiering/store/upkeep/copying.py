"""Copies blocks into another tier, in that tier's encoding, every checksum compared on the way.

A copy has three steps: room is reserved; the file is filled under a temporary name; it is made
durable, gets its name and is entered into the books. The last one is best done for many files at
once: one commit of a file system's journal then does for several.

No OSError leaves this module, none deletes anything; a damaged source is quarantined. The caller
holds the record and sees to it that nobody else copies it there.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Sequence
from dataclasses import dataclass

from ollama_tiering.store.block.blockfile import BlockMeta
from ollama_tiering.store.block.key import BlockKey
from ollama_tiering.store.books import copies, reserving, suspects, weather
from ollama_tiering.store.books.lru import Reservation
from ollama_tiering.store.books.state import Level, StoreState
from ollama_tiering.store.books.tree import BlockRecord
from ollama_tiering.store.books.writing_down import Failure
from ollama_tiering.store.errors import CorruptBlock, UnsupportedFormat
from ollama_tiering.store.tiers.checked import checked_meta
from ollama_tiering.store.tiers.contract import OpenBlock, TempBlock
from ollama_tiering.store.upkeep import judging, making_room, transcode, unlinking
from ollama_tiering.store.upkeep.transcode import Seconds

log = logging.getLogger(__name__)


@dataclass(slots=True)
class Filled:
    """A file that is complete, under a temporary name."""

    record: BlockRecord
    source: Level
    target: Level
    reservation: Reservation[BlockKey]
    temp: TempBlock
    meta: BlockMeta
    file_bytes: int
    encoded: bool
    spent: Seconds
    counts: bool  # reading it says something about the source's speed


class Copier:
    """Thread-safe."""

    def __init__(self, state: StoreState) -> None:
        self._state = state

    def copy(self, record: BlockRecord, source: Level, target: Level) -> bool:
        """All of it for one block. False: it is not there, and the books say why."""
        encodings = self._state.encodings
        decodes = source.index in record.encoded and encodings.keeps_raw(target, record.namespace)
        read_bytes = record.bytes_at(source.index)
        if decodes:
            encodings.decoding.begin()
        if source.shared is not None:
            source.speed.busy.begin()
        copied: Filled | None = None
        spent = Seconds()
        try:
            reservation = self.reserve(record, target)
            if not isinstance(reservation, Failure):
                filled = self.fill(record, source, target, reservation, spent)
                if not isinstance(filled, Failure) and self.publish([filled]):
                    copied = filled
        finally:
            after = spent.writing + spent.coding
            if decodes:
                encodings.decoding.end(record.file_bytes if copied else 0, spent.reading, after)
            if source.shared is not None:  # what decoding takes is expected besides
                counted, rest = (spent.reading, after) if decodes else (spent.reading + after, 0.0)
                source.speed.busy.end(read_bytes if copied else 0, counted, rest)
        if copied is None:
            return False
        target.speed.add_write(copied.file_bytes, spent.writing)
        if copied.counts:
            source.speed.add_read(copied.meta.file_bytes, spent.reading)
        return True

    def reserve(self, record: BlockRecord, target: Level) -> Reservation[BlockKey] | Failure:
        """Room for the raw file, evicting what must go; encoded, it will take less."""
        state = self._state
        if not target.surveyed or not unlinking.wait_for_name(state, target, record.key):
            return Failure.OTHER
        if not state.admission.charge(target, record.file_bytes):
            return Failure.NOT_TODAY
        reservation = making_room.reserve(state, target, record.file_bytes, record.namespace)
        if reservation is None:
            state.admission.refund(target, record.file_bytes)
            return Failure.NO_ROOM if state.waits_for(target) else Failure.OTHER
        return reservation

    def fill(
        self,
        record: BlockRecord,
        source: Level,
        target: Level,
        reservation: Reservation[BlockKey],
        spent: Seconds,
    ) -> Filled | Failure:
        """The reservation is released unless it succeeds."""
        state = self._state
        temp: TempBlock | None = None
        at = source
        watched: WatchedBlock | None = None
        try:
            with source.tier.open(record.namespace, record.key) as opened:
                block = watched = WatchedBlock(opened)
                # A shared source is timed by `copy`, several blocks at once.
                counts = source.shared is None and source.speed.counts(opened)
                meta = checked_meta(block, record.namespace, record.key)
                if meta.raw_file_bytes != record.file_bytes:
                    self._abandon(target, temp, reservation)
                    copies.correct_size(state, record, source, meta.file_bytes, meta.raw_file_bytes)
                    return Failure.OTHER
                transfer = transcode.plan(meta, block, state.encodings, target, spent)
                at = target
                temp = making_room.create_temp(
                    state, target, record.namespace, record.key, transfer.file_bytes, reservation
                )
                transfer.write_to(temp, spent)
        except (UnsupportedFormat, CorruptBlock) as error:
            self._abandon(target, temp, reservation)
            judging.judge(state, source, record.namespace, record.key, error, known=True)
            return Failure.OTHER
        except FileNotFoundError as error:
            self._abandon(target, temp, reservation)
            if (temp is None and at is source) or (watched is not None and watched.failed):
                suspects.came_upon(state, record.key, damaged=False)
                copies.forget(state, source, record.key)
            else:
                weather.failed(state, target, error, "copy")
            return Failure.OTHER
        except OSError as error:
            self._abandon(target, temp, reservation)
            unread = watched is not None and watched.failed
            weather.failed(state, source if unread else at, error, "copy")
            return Failure.OTHER
        return Filled(
            record,
            source,
            target,
            reservation,
            temp,
            meta,
            transfer.file_bytes,
            transfer.encoded,
            spent,
            counts,
        )

    def seal(self, filled: Filled) -> bool:
        """Makes the file's content durable; several at once take hardly longer than one. Left to
        `publish` where it is not done before.
        """
        try:
            filled.target.tier.seal(filled.temp)
        except OSError as error:
            weather.failed(self._state, filled.target, error, "copy")
            return False
        return True

    def publish(self, batch: Sequence[Filled]) -> int:
        """Names the files in order, durable first, and enters them into the books. Returns how
        many, from the first on; the rest is discarded. `sync_names` is left to the caller.
        """
        state = self._state
        start = time.perf_counter()
        named: list[tuple[Filled, int]] = []
        at: Filled | None = None
        try:
            for at in batch:
                named.append((at, at.target.tier.publish(at.temp, durable=False)))
        except OSError as error:
            if at is not None:
                weather.failed(state, at.target, error, "copy")
        share = (time.perf_counter() - start) / max(1, len(batch))
        for filled, stored_bytes in named:
            filled.spent.writing += share
            self._enter(filled, stored_bytes)
        self.discard(batch[len(named) :])
        return len(named)

    def discard(self, batch: Sequence[Filled]) -> None:
        for filled in batch:
            self._abandon(filled.target, filled.temp, filled.reservation)

    def _enter(self, filled: Filled, stored_bytes: int) -> None:
        state, record, target = self._state, filled.record, filled.target
        file = copies.CopiedFile(
            filled.file_bytes,
            stored_bytes,
            filled.encoded,
            filled.spent.writing,
            filled.meta.file_bytes,
            filled.spent.reading,
        )
        copies.copied(state, record, filled.source, target, filled.reservation, file)
        if target.index < filled.source.index:
            self._settle(filled.source, record)
        elif target.shared is not None:
            self._settle(target, record)

    def _abandon(
        self, level: Level, temp: TempBlock | None, reservation: Reservation[BlockKey]
    ) -> None:
        """What reached the disk before it went wrong stays charged to the day."""
        if temp is not None:
            unlinking.discard(level, temp)
        reserving.release(self._state, reservation)

    def _settle(self, level: Level, record: BlockRecord) -> None:
        """The copy in RAM serves reads; the one below it need not fill the page cache too."""
        try:
            level.tier.drop_pages(record.namespace, record.key)
        except OSError as error:
            log.debug("settle failed: key=%s error=%s", record.key.hex(), error)


class WatchedBlock:
    """An open block that remembers whether reading it failed: else a copy's target is to blame."""

    def __init__(self, block: OpenBlock) -> None:
        self._block = block
        self.file_bytes = block.file_bytes
        self.failed = False

    def read_at(self, offset: int, length: int) -> bytes:
        try:
            return self._block.read_at(offset, length)
        except OSError:
            self.failed = True
            raise

    def read_into(self, offset: int, buffer: memoryview) -> None:
        try:
            self._block.read_into(offset, buffer)
        except OSError:
            self.failed = True
            raise

    def resident(self) -> bool | None:
        return self._block.resident()
