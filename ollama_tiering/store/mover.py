"""Moves blocks between neighbouring tiers: write down, promote, trim to the low watermark.

`step` does one piece of work and may be driven by a thread or by a test. No OSError leaves it, none
deletes anything; a damaged source is quarantined.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable
from typing import Final

from ollama_tiering.store import room, transcode
from ollama_tiering.store.blockfile import read_meta
from ollama_tiering.store.errors import CorruptBlock, UnsupportedFormat
from ollama_tiering.store.key import BlockKey
from ollama_tiering.store.state import Level, StoreState
from ollama_tiering.store.tier import OpenBlock, TempBlock
from ollama_tiering.store.transcode import Seconds
from ollama_tiering.store.tree import BlockRecord

log = logging.getLogger(__name__)

_PART_BYTES: Final = 1 << 20


class Mover:
    """Not thread-safe: one driver at a time."""

    def __init__(self, state: StoreState, *, high_watermark: float, low_watermark: float) -> None:
        self._state = state
        self._high = high_watermark
        self._low = low_watermark
        self._trimming: set[int] = set()  # levels on their way from high to low

    def step(self) -> bool:
        """The most urgent piece of work; False when there is none that could be done now."""
        return self.sample() or self.trim() or self.promote_one() or self.write_down_one()

    def sample(self) -> bool:
        """Times a short read of a block that a client is about to read, if it is still on the disk.

        The client has the path and reads without the sidecar: this is what the disk gives then.
        """
        state = self._state
        with state.lock:
            record = state.tree.get(state.to_sample.pop()) if state.to_sample else None
            if record is None or not record.levels:
                return False
            level = state.levels[min(record.levels)]
            if level.shared is not None:
                return True  # it is copied up before a client reads it, and timed then
        try:
            with level.tier.open(record.namespace, record.key) as block:
                if level.speed.counts(block):
                    length = min(_PART_BYTES, block.file_bytes)
                    start = time.perf_counter()
                    block.read_at(block.file_bytes - length, length)
                    level.speed.add_read(length, time.perf_counter() - start)
        except OSError as error:
            log.debug("not sampled: key=%s error=%s", record.key.hex(), error)
        return True

    def trim(self) -> bool:
        """Empties a tier with one below it from the high to the low watermark.

        Once begun it goes on over several steps: what is not written down yet has to be first.
        """
        state = self._state
        trimmed = False
        for level in state.levels[:-1]:
            budget = level.lru.budget_bytes
            with state.lock:
                below = state.below(level)
                if below is not None and below.shared is not None and state.suspended(below):
                    continue  # out of reach: this level goes on as the last, and fills up
                if level.lru.claimed_bytes > self._high * budget:
                    self._trimming.add(level.index)
                surplus = level.lru.claimed_bytes - int(self._low * budget)
                if surplus <= 0:
                    self._trimming.discard(level.index)
                if level.index not in self._trimming:
                    continue
                doomed = state.take_victims(level, surplus, partial=True)
            room.unlink(state, doomed)
            trimmed = trimmed or bool(doomed)
        return trimmed

    def write_down_one(self) -> bool:
        """Copies the block that waits longest one tier down; it stays above until trimmed."""
        state = self._state
        with state.lock:
            key = next(iter(state.unsaved), None)
            record = state.tree.get(key) if key is not None else None
            if key is None:
                return False
            if record is None:
                del state.unsaved[key]
                return True
            source = state.levels[min(record.levels)]
            target = state.below(source)
            if target is not None and target.shared is not None and source.index == 0:
                return False  # the shared tier's own mover does it
            if target is None or target.index in record.levels or source.index > 0:
                del state.unsaved[key]
                return True
            if state.suspended(target) or state.suspended(source):
                return False
            if record.file_bytes > target.lru.budget_bytes:
                del state.unsaved[key]  # it can live in the tier above only
                return True
            state.pin(key)
        try:
            done = self.copy(record, source, target)
        finally:
            with state.lock:
                state.unpin(key)
        if done:
            with state.lock:
                state.unsaved.pop(key, None)
        elif key in state.unsaved:
            with state.lock:
                if key in state.unsaved:
                    state.unsaved.move_to_end(key)
        return done

    def promote_one(self) -> bool:
        """Copies a block that was asked for into RAM if that has room without evicting anything."""
        state = self._state
        with state.lock:
            if not state.promotable:
                return False
            key, _ = state.promotable.popitem(last=False)
            record = state.tree.get(key)
            top = state.levels[0]
            if record is None or not record.levels or top.index in record.levels:
                return True
            if key in state.staging:
                return True
            source = state.levels[min(record.levels)]
            if source.shared is not None:
                return True  # it was copied up when it was asked for, or could not be
            after = top.lru.claimed_bytes + record.file_bytes
            if after > self._low * top.lru.budget_bytes or state.suspended(top):
                return True
            state.pin(key)
            state.staging[key] = threading.Event()
        try:
            if self.copy(record, source, top):
                with state.lock:
                    top.stats.promoted_blocks += 1
        finally:
            with state.lock:
                state.unpin(key)
                done = state.staging.pop(key)
            done.set()
        return True

    def copy(self, record: BlockRecord, source: Level, target: Level) -> bool:
        """Copies one block into another tier, in that tier's encoding. False: it is not there, and
        the books say why. Thread-safe, unlike the rest: the caller has pinned the record and sees
        to it that nobody else copies it there.
        """
        codec, spent = self._state.codec, Seconds()
        decodes = source.index in record.encoded and codec.keeps_raw(target, record.namespace)
        read_bytes = record.bytes_at(source.index)
        if decodes:
            codec.decoding.begin()
        if source.shared is not None:
            source.speed.busy.begin()
        copied = False
        try:
            copied = self._copy(record, source, target, spent)
        finally:
            after = spent.writing + spent.coding
            if decodes:
                codec.decoding.end(record.file_bytes if copied else 0, spent.reading, after)
            if source.shared is not None:  # what decoding takes is expected besides
                counted, rest = (spent.reading, after) if decodes else (spent.reading + after, 0.0)
                source.speed.busy.end(read_bytes if copied else 0, counted, rest)
        return copied

    def _copy(self, record: BlockRecord, source: Level, target: Level, spent: Seconds) -> bool:
        state = self._state
        claim = room.reserve_room(state, target, record.file_bytes)  # encoded, it takes less
        if claim is None:
            return False
        temp: TempBlock | None = None
        at = source
        watched: WatchedBlock | None = None
        try:
            with source.tier.open(record.namespace, record.key) as opened:
                block = watched = WatchedBlock(opened)
                # A shared source is timed by `copy`, several blocks at once.
                counts = source.shared is None and source.speed.counts(opened)
                meta = read_meta(block.read_at, block.file_bytes)
                if meta.raw_file_bytes != record.file_bytes:
                    self._abandon(target, temp, claim.release)
                    with state.lock:
                        state.correct_size(record, source, meta.file_bytes, meta.raw_file_bytes)
                    return False
                transfer = transcode.plan(meta, block, state.codec, target, spent)
                at = target
                temp = room.create_temp(
                    state, target, record.namespace, record.key, transfer.file_bytes
                )
                transfer.write_to(temp, spent)
            start = time.perf_counter()
            stored_bytes = target.tier.publish(temp)
            spent.writing += time.perf_counter() - start
        except UnsupportedFormat as error:
            self._abandon(target, temp, claim.release)
            log.warning("block not readable here, kept: key=%s reason=%s", record.key.hex(), error)
            room.set_aside(state, source, record.key)
            return False
        except CorruptBlock as error:
            self._abandon(target, temp, claim.release)
            log.warning("block damaged: key=%s reason=%s", record.key.hex(), error)
            room.quarantine(state, source, record.namespace, record.key)
            return False
        except FileNotFoundError as error:
            self._abandon(target, temp, claim.release)
            with state.lock:
                if (temp is None and at is source) or (watched is not None and watched.failed):
                    state.forget_copy(source, record.key)
                else:
                    state.failed(target, error, "copy")
            return False
        except OSError as error:
            self._abandon(target, temp, claim.release)
            with state.lock:
                unread = watched is not None and watched.failed
                state.failed(source if unread else at, error, "copy")
            return False
        with state.lock:
            claim.commit(record.key, stored_bytes)
            if target.shared is not None:
                took_bytes = max(transfer.file_bytes, stored_bytes)
                target.shared.took_less(claim.reserved_bytes, took_bytes)
            if transfer.encoded:
                record.encoded[target.index] = transfer.file_bytes
            state.add_copy(record, target, stored_bytes)
            state.worked(target)
            target.stats.written_bytes += stored_bytes
            source.stats.read_bytes += meta.file_bytes
        if counts:
            source.speed.add_read(meta.file_bytes, spent.reading)
        target.speed.add_write(transfer.file_bytes, spent.writing)
        self._settle(source if target.index < source.index else target, record)
        return True

    def _abandon(self, level: Level, temp: TempBlock | None, release: Callable[[], None]) -> None:
        if temp is not None:
            room.discard(level, temp)
        with self._state.lock:
            release()

    def _settle(self, level: Level, record: BlockRecord) -> None:
        """The copy in RAM serves reads; the one below it need not fill the page cache too."""
        try:
            level.tier.settle(record.namespace, record.key)
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

    def resident(self) -> bool | None:
        return self._block.resident()


def unsaved_bytes(state: StoreState) -> tuple[int, int]:
    """(blocks, bytes) that are in the tier above only. Takes the lock."""
    with state.lock:
        records = [state.tree.get(BlockKey(key)) for key in state.unsaved]
        sizes = [record.file_bytes for record in records if record is not None]
    return len(sizes), sum(sizes)
