"""Moves blocks between neighbouring tiers: write down, promote, trim to the low watermark. Evicts
what a lowered budget, the free-space floor or old age wants gone.

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
from ollama_tiering.store.blockfile import check_place, read_meta
from ollama_tiering.store.errors import CorruptBlock, UnsupportedFormat
from ollama_tiering.store.expiry import Expiry
from ollama_tiering.store.key import BlockKey
from ollama_tiering.store.state import Level, StoreState
from ollama_tiering.store.tier import OpenBlock, TempBlock, TierKind
from ollama_tiering.store.transcode import Seconds
from ollama_tiering.store.tree import BlockRecord

log = logging.getLogger(__name__)

_PART_BYTES: Final = 1 << 20
_GIVE_BACK_SECONDS: Final = 10.0


class Mover:
    """Not thread-safe: one driver at a time."""

    def __init__(self, state: StoreState, *, high_watermark: float, low_watermark: float) -> None:
        self._state = state
        self._high = high_watermark
        self._low = low_watermark
        self._trimming: set[int] = set()  # levels on their way from high to low
        self._refusals = 0  # copies for which a tier had no room
        self._gave_back = state.clock()
        self._expiry = Expiry(state.policy.ttl_seconds, state.clock, state.wall_clock)

    def set_watermarks(self, high: float, low: float) -> None:
        self._high, self._low = high, low

    def step(self) -> bool:
        """The most urgent piece of work; False when there is none that could be done now."""
        return (
            self.sample()
            or self.give_way()
            or self.trim()
            or self.promote_one()
            or self.write_down_one()
        )

    def give_way(self) -> bool:
        """Back to the budgets at once, back to the free-space floor and past old age now and then.

        Only now and then: where others fill the disk, or a client still has an evicted file open,
        evicting more would not free more.
        """
        state = self._state
        moved = [room.shrink(state, level) for level in state.levels]
        if state.early:
            moved.append(self._drop_early())
        now = state.clock()
        if not 0 <= now - self._gave_back < _GIVE_BACK_SECONDS:
            self._gave_back = now
            moved += [room.give_back(state, level) for level in state.levels]
            moved.append(self._expiry.run(state))
        return any(moved)

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

    def _drop_early(self) -> bool:
        """Blocks whose parent was not stored after all, and that were in use when that was seen."""
        state = self._state
        with state.lock:
            failed = [key for key in state.early if key not in state.writing]
            doomed = [one for key in failed for one in state.drop_early(key)]
        room.unlink(state, doomed)
        return bool(doomed)

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
                state.admission.press(level, surplus)
                doomed = state.take_victims(level, surplus, partial=True)
            room.unlink(state, doomed)
            trimmed = trimmed or bool(doomed)
        return trimmed

    def drain(self, deadline: float) -> None:
        """Writes down what is wanted on disk until the (clock) deadline; nothing else."""
        state = self._state
        while state.clock() < deadline:
            with state.lock:
                state.unsaved.hurry()
            if not self.write_down_one():
                return

    def write_down_one(self) -> bool:
        """Copies the block that waits longest one tier down; it stays above until trimmed."""
        state = self._state
        with state.lock:
            key = state.unsaved.first(state.clock())
            if key is None:
                return not len(state.unsaved) and state.admission.refill()
            record = state.tree.get(key)
            if record is None:
                state.unsaved.discard(key)
                return True
            source = state.levels[min(record.levels)]
            target = state.below(source)
            if target is not None and target.shared is not None and source.index == 0:
                return False  # the shared tier's own mover does it
            if target is None or target.index in record.levels or source.index > 0:
                state.unsaved.discard(key)
                return True
            if not state.waits_for(target) or state.suspended(source):
                return False
            if record.file_bytes + target.tier.growth_bytes > target.lru.budget_bytes:
                state.unsaved.discard(key)  # it can live in the tier above only
                return True
            record = self._first_missing(record, source, target)
            # The block before it too: making room must not evict what makes this one worth having.
            held = (record.key, BlockKey(record.parent))
            for one in held:
                state.pin(one)
            refusals = self._refusals
        try:
            done = self.copy(record, source, target)
        finally:
            with state.lock:
                for one in held:
                    state.unpin(one)
        with state.lock:
            if done:
                state.unsaved.discard(record.key)
            elif self._refusals > refusals:
                state.admission.no_room(key, record.key)
                return True  # RAM may evict them now
            else:
                state.unsaved.defer(record.key)
                state.unsaved.defer(key)
                done = source.index not in record.levels  # damaged or gone: that much is settled
        return done

    def _first_missing(self, record: BlockRecord, source: Level, target: Level) -> BlockRecord:
        """The block itself, or one before it that the tier below lacks: a chain has no holes."""
        for before in self._state.tree.ancestors(record.parent):
            if source.index not in before.levels or max(before.levels) >= target.index:
                break
            record = before
        return record

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
            after = top.lru.claimed_bytes + record.file_bytes + top.tier.growth_bytes
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
        if not target.surveyed or not state.admission.charge(target, record.file_bytes):
            return False
        claim = room.reserve_room(state, target, record.file_bytes)  # encoded, it takes less
        if claim is None:
            state.admission.refund(target, record.file_bytes)
            self._refusals += state.waits_for(target)
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
                check_place(meta, record.namespace, record.key)
                if meta.raw_file_bytes != record.file_bytes:
                    self._abandon(target, temp, claim.release)
                    with state.lock:
                        state.correct_size(record, source, meta.file_bytes, meta.raw_file_bytes)
                    return False
                transfer = transcode.plan(meta, block, state.codec, target, spent)
                at = target
                temp = room.create_temp(
                    state, target, record.namespace, record.key, transfer.file_bytes, claim
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
            state.count_overhead(target)
            state.worked(target)
            target.stats.written_bytes += stored_bytes
            target.stats.write_seconds += spent.writing
            source.stats.read_bytes += meta.file_bytes
            source.stats.read_seconds += spent.reading
        if counts:
            source.speed.add_read(meta.file_bytes, spent.reading)
        target.speed.add_write(transfer.file_bytes, spent.writing)
        self._settle(source if target.index < source.index else target, record)
        return True

    def _abandon(self, level: Level, temp: TempBlock | None, release: Callable[[], None]) -> None:
        """What reached the disk before it went wrong stays charged to the day."""
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

    def read_into(self, offset: int, buffer: memoryview) -> None:
        try:
            self._block.read_into(offset, buffer)
        except OSError:
            self.failed = True
            raise

    def resident(self) -> bool | None:
        return self._block.resident()


def only_in_ram(state: StoreState) -> tuple[int, int]:
    """(blocks, bytes) that no disk holds: they do not outlive a reboot. Takes the lock."""
    with state.lock:
        top = state.levels[0]
        if len(state.levels) == 1 or (not top.tier.in_memory and top.tier.kind is not TierKind.RAM):
            return 0, 0
        records = [state.tree.get(key) for key in top.lru]
        sizes = [r.file_bytes for r in records if r is not None and len(r.levels) == 1]
    return len(sizes), sum(sizes)
