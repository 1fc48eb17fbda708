"""One writer: reserve -> fill -> commit. What is not committed when the session ends is released.

A session is used by one thread at a time; different sessions run side by side.
"""

from __future__ import annotations

import contextlib
import itertools
import logging
import time
from collections.abc import Sequence
from dataclasses import dataclass
from types import TracebackType
from typing import Final

from ollama_tiering.store.block.blockfile import (
    MAX_HEADER_BYTES,
    PREAMBLE_BYTES,
    buffer_reader,
    declared_file_bytes,
    read_meta,
    verify_payload,
)
from ollama_tiering.store.block.key import BlockKey, NamespaceId
from ollama_tiering.store.books.covering import take_covered
from ollama_tiering.store.books.lru import Reservation
from ollama_tiering.store.books.state import Doomed, Level, StoreState
from ollama_tiering.store.books.tree import BlockRecord
from ollama_tiering.store.errors import CorruptBlock, InvalidBlock, NoRoom, UnsupportedFormat
from ollama_tiering.store.serving.offers import (
    Claim,
    CommitResult,
    Outcome,
    Reserved,
    check_claim,
    check_meta,
)
from ollama_tiering.store.tiers.contract import TempBlock, TierKind
from ollama_tiering.store.upkeep import room, shares, transcode
from ollama_tiering.store.upkeep.opening import record_of
from ollama_tiering.system.quiet_log import QuietLog

__all__ = ["Claim", "CommitResult", "Outcome", "Reserved", "WriteSession"]

seldom = QuietLog(logging.getLogger(__name__))

_HEAD_LIMIT_BYTES: Final = PREAMBLE_BYTES + MAX_HEADER_BYTES


@dataclass(slots=True)
class _Pending:
    claim: Claim
    level: Level
    temp: TempBlock
    room: Reservation[BlockKey]
    deadline: float
    charged_bytes: int = 0  # of the day's writes


@dataclass(slots=True)
class _Inline:
    key: BlockKey
    head: bytearray
    deadline: float
    written_bytes: int = 0
    pending: _Pending | None = None


class WriteSession:
    """Opened by TieredStore.open_session; a context manager."""

    _ids = itertools.count(1)

    def __init__(
        self,
        state: StoreState,
        namespace: NamespaceId,
        block_tokens: int,
        reserve_seconds: float,
        *,
        rounded: bool = False,
    ) -> None:
        """`rounded`: rows are rounded to q8_0 before a block is visible."""
        self._state = state
        self.namespace = namespace
        self._block_tokens = block_tokens
        self._reserve_seconds = reserve_seconds
        self._rounded = rounded
        self._pending: dict[int, _Pending] = {}  # under the state's lock
        self._inline: _Inline | None = None

    def reserve(self, claims: Sequence[Claim]) -> list[Reserved]:
        """One answer per claim. After the first that is not taken none of the rest is either."""
        for claim in claims:
            check_claim(claim)
        if refusal := self._state.terms.of(self.namespace).refusal:
            return [Reserved(Outcome.REFUSED, reason=refusal)] * len(claims)
        answers: list[Reserved] = []
        for claim in claims:
            if answers and answers[-1].outcome in (Outcome.NO_ROOM, Outcome.REFUSED):
                answers.append(Reserved(answers[-1].outcome))
                continue
            pending = self._claim(claim)
            if isinstance(pending, Outcome):
                answers.append(Reserved(pending))
                continue
            reservation_id = next(self._ids)
            with self._state.lock:
                self._pending[reservation_id] = pending
            answers.append(Reserved(Outcome.RESERVED, reservation_id, pending.temp.path))
        return answers

    def commit(self, reservation_ids: Sequence[int]) -> list[CommitResult]:
        """Checks each filled file against its reservation and makes it visible."""
        results = []
        claims: list[Claim] = []
        for reservation_id in reservation_ids:
            with self._state.lock:
                pending = self._pending.pop(reservation_id, None)
            if pending is None:
                results.append(CommitResult(False, "no such reservation, or it has expired"))
            else:
                results.append(self._commit(pending, verify=False))
                claims.append(pending.claim)
        self._touch(claims)
        return results

    def put_inline(self, key: BlockKey, part: bytes, *, last: bool) -> CommitResult | None:
        """One part of a block file; the answer comes with the last. NoRoom, InvalidBlock."""
        inline = self._inline
        if inline is None:
            deadline = self._state.clock() + self._reserve_seconds
            inline = self._inline = _Inline(key, bytearray(), deadline)
        try:
            if inline.deadline <= self._state.clock():
                raise InvalidBlock("the block was not complete in time")
            if inline.key != key:
                raise InvalidBlock("parts of two blocks are mixed")
            present = self._take_part(inline, part)
            if not last:
                return None
            self._inline = None
            if present:
                return CommitResult(True)
            pending = inline.pending
            if pending is None or inline.written_bytes != pending.claim.file_bytes:
                raise InvalidBlock("the block ends before its header says")
            inline.pending = None
            result = self._commit(pending, verify=True)
            self._touch([pending.claim])
            return result
        except BaseException:
            self._inline = None
            if inline.pending is not None:
                self._drop(inline.pending)
            raise

    def release_expired(self, now: float) -> int:
        with self._state.lock:
            over = [i for i, pending in self._pending.items() if pending.deadline <= now]
            dropped = [self._pending.pop(i) for i in over]
        for pending in dropped:
            self._drop(pending)
        return len(dropped)

    def close(self) -> None:
        with self._state.lock:
            left = list(self._pending.values())
            self._pending.clear()
        if self._inline is not None and self._inline.pending is not None:
            left.append(self._inline.pending)
            self._inline = None
        for pending in left:
            self._drop(pending)

    def __enter__(self) -> WriteSession:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()

    def _claim(self, claim: Claim) -> _Pending | Outcome:
        state = self._state
        with state.lock:
            record = state.tree.get(claim.key)
            # What only a tier out of reach holds is stored anew: for now it is not there.
            there = record is not None and state.reachable(record) is not None
            if there or claim.key in state.writing:
                if record is not None:
                    state.touch(state.tree.ancestors(claim.key))
                return Outcome.PRESENT
            if claim.key in state.leaving:
                return Outcome.NO_ROOM
            full = state.admission.reservations_full(len(self._pending))
            if not full:
                state.writing.add(claim.key)
                state.pin(BlockKey(claim.parent))
        if full:
            seldom.warning("reservations", "reservation refused: %s", full)
            return Outcome.NO_ROOM
        pending: _Pending | Outcome = Outcome.NO_ROOM
        try:
            pending = self._find_room(claim)
        finally:
            if isinstance(pending, Outcome):
                self._unclaim(claim)
        return pending

    def _find_room(self, claim: Claim) -> _Pending | Outcome:
        """In the first tier that has room. A client cannot fill a file on a remote one."""
        state = self._state
        outcome = Outcome.NO_ROOM
        for level in state.levels:
            if level.tier.kind is TierKind.REMOTE or state.suspended(level):
                continue
            if not state.admission.direct(claim.key, level):
                outcome = Outcome.REFUSED
                continue
            reservation = shares.reserve_room(state, level, self.namespace, claim.file_bytes)
            if reservation is None:
                continue
            if not state.admission.charge(level, claim.file_bytes):
                with state.lock:
                    reservation.release()
                outcome = Outcome.REFUSED
                continue
            try:
                temp = room.create_temp(
                    state, level, self.namespace, claim.key, claim.file_bytes, reservation
                )
            except OSError as error:
                state.admission.refund(level, claim.file_bytes)
                with state.lock:
                    reservation.release()
                    state.failed(level, error, "reserve")
                continue
            deadline = state.clock() + self._reserve_seconds
            return _Pending(claim, level, temp, reservation, deadline, claim.file_bytes)
        return outcome

    def _touch(self, claims: Sequence[Claim]) -> None:
        """Marks the chains as used that end with these, each once however many of its blocks."""
        state = self._state
        parents = {claim.parent for claim in claims}
        with state.lock:
            for claim in claims:
                if claim.key not in parents:
                    state.touch(state.tree.ancestors(claim.key))

    def _rooted(self, parent: bytes) -> bool:
        """Whether the block before is there or on its way. Lock held."""
        state = self._state
        return parent == self.namespace or parent in state.tree or parent in state.writing

    def _commit(self, pending: _Pending, *, verify: bool) -> CommitResult:
        state, level = self._state, pending.level
        try:
            if refusal := state.terms.of(self.namespace).refusal:
                raise InvalidBlock(refusal)  # since it was reserved
            with pending.temp.open() as block:
                meta = read_meta(block.read_at, block.file_bytes)
                check_meta(meta, pending.claim, self.namespace, self._block_tokens)
                if verify:
                    verify_payload(meta, block.read_at)
                if self._rounded:
                    transcode.round_rows(meta, block, pending.temp)
            record = record_of(meta, state.wall_clock())
            with state.lock:
                covered = state.tree.covered_by(record) is not None
                rooted = self._rooted(record.parent)
            if covered:
                self._drop(pending)
                return CommitResult(True, "covered by a longer block")  # nothing is left to do
            if not rooted:
                raise InvalidBlock("the block before it is not stored")
            start = time.perf_counter()
            stored_bytes = level.tier.publish(pending.temp)
            seconds = time.perf_counter() - start
        except (CorruptBlock, UnsupportedFormat, InvalidBlock) as error:
            self._drop(pending)
            said = "commit refused: key=%s reason=%s"
            seldom.warning("commit", said, pending.claim.key.hex(), error)
            return CommitResult(False, str(error))
        except OSError as error:
            with state.lock:
                state.failed(level, error, "commit")
            with contextlib.suppress(OSError):  # renamed already, but perhaps not durable
                level.tier.remove(self.namespace, pending.claim.key)
            self._drop(pending)
            return CommitResult(False, f"{level.tier.kind.label} tier: {error.strerror or error}")
        pending.charged_bytes = 0  # written, whatever becomes of it
        with state.lock:
            rooted = self._rooted(record.parent)
            if rooted:
                level.stats.write_seconds += seconds
                doomed = self._enter(pending, record, stored_bytes)
        if not rooted:
            with contextlib.suppress(OSError):
                level.tier.remove(self.namespace, record.key)
            self._drop(pending)
            return CommitResult(False, "the block before it was not stored")
        room.unlink(state, doomed)
        state.work.set()
        return CommitResult(True)

    def _enter(self, pending: _Pending, record: BlockRecord, stored_bytes: int) -> list[Doomed]:
        """Into the books. Lock held."""
        state, level = self._state, pending.level
        pending.room.commit(record.key, stored_bytes)
        record = state.add_copy(record, level, stored_bytes)  # a survey may have been first
        state.writing.discard(record.key)
        state.early.pop(record.key, None)
        if record.parent in state.writing:
            state.early.setdefault(record.parent, []).append(record.key)
        state.unpin(BlockKey(pending.claim.parent))
        doomed = take_covered(state, record, level.index)
        # A window moves on with its conversation: like a tail it is soon replaced by another.
        state.admission.committed(record, level, tail=pending.claim.tail or record.window)
        state.counters.put_blocks += 1
        state.counters.put_bytes += record.file_bytes
        level.stats.written_bytes += stored_bytes
        state.worked(level)
        state.count_overhead(level)
        return doomed

    def _take_part(self, inline: _Inline, part: bytes) -> bool:
        """Writes what can be written. True when the block is stored already."""
        if inline.pending is not None:
            if inline.written_bytes + len(part) > inline.pending.claim.file_bytes:
                raise InvalidBlock("the block is longer than its header says")
            inline.pending.temp.write_at(inline.written_bytes, part)
            inline.written_bytes += len(part)
            return False
        with self._state.lock:
            if inline.key in self._state.tree:
                return True
        inline.head += part
        file_bytes = declared_file_bytes(inline.head)
        if file_bytes is None:
            if len(inline.head) > _HEAD_LIMIT_BYTES:
                raise InvalidBlock("no block header where it should be")
            return False
        try:
            meta = read_meta(buffer_reader(inline.head), file_bytes)
        except (CorruptBlock, UnsupportedFormat) as error:
            raise InvalidBlock(str(error)) from None
        if meta.encoded:
            raise InvalidBlock("a client stores blocks raw; the tiers encode them")
        if refusal := self._state.terms.of(self.namespace).refusal:
            raise NoRoom(refusal)
        claim = Claim(inline.key, meta.parent, file_bytes, meta.rows < self._block_tokens)
        check_claim(claim)
        pending = self._claim(claim)
        if isinstance(pending, Outcome):
            if pending is Outcome.PRESENT:
                return True
            reason = "and nothing may be evicted" if pending is Outcome.NO_ROOM else "today or yet"
            raise NoRoom(f"no room for the block {reason}")
        inline.pending = pending
        head, inline.head = bytes(inline.head), bytearray()
        return self._take_part(inline, head)

    def _drop(self, pending: _Pending) -> None:
        state = self._state
        room.discard(pending.level, pending.temp)
        state.admission.refund(pending.level, pending.charged_bytes)
        with state.lock:
            pending.room.release()
            state.writing.discard(pending.claim.key)
            doomed = state.drop_early(pending.claim.key)
            state.count_overhead(pending.level)
        room.unlink(state, doomed)
        self._unclaim(pending.claim)

    def _unclaim(self, claim: Claim) -> None:
        with self._state.lock:
            self._state.writing.discard(claim.key)
            self._state.unpin(BlockKey(claim.parent))
