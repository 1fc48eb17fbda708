"""One writer: reserve -> fill -> commit. What is not committed when the session ends is released.

A session is used by one thread at a time; different sessions run side by side.
"""

from __future__ import annotations

import contextlib
import itertools
import logging
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
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
from ollama_tiering.store.books import entering, reserving, weather
from ollama_tiering.store.books.entering import OfferAnswer
from ollama_tiering.store.books.lru import Reservation
from ollama_tiering.store.books.state import Level, StoreState
from ollama_tiering.store.errors import CorruptBlock, InvalidBlock, NoRoom, UnsupportedFormat
from ollama_tiering.store.serving.offers import (
    BlockOffer,
    CommitResult,
    Outcome,
    Reserved,
    check_meta,
    check_offer,
)
from ollama_tiering.store.tiers.contract import TempBlock
from ollama_tiering.store.upkeep import chain_check, making_room, transcode, unlinking
from ollama_tiering.store.upkeep.opening import record_of
from ollama_tiering.system.closing import Closing
from ollama_tiering.system.quiet_log import QuietLog

__all__ = ["BlockOffer", "CommitResult", "Outcome", "Reserved", "WriteSession"]

seldom = QuietLog(logging.getLogger(__name__))

_HEAD_LIMIT_BYTES: Final = PREAMBLE_BYTES + MAX_HEADER_BYTES
_ASK_AGAIN_SECONDS: Final = 0.005  # whether a name is free


@dataclass(slots=True)
class _Pending:
    offer: BlockOffer
    level: Level
    temp: TempBlock
    reservation: Reservation[BlockKey]
    deadline: float
    charged_bytes: int = 0  # of the day's writes


@dataclass(slots=True)
class _Inline:
    key: BlockKey
    head: bytearray
    deadline: float
    written_bytes: int = 0
    pending: _Pending | None = None


class WriteSession(Closing):
    """Opened by TieredStore.open_session; a context manager."""

    _ids = itertools.count(1)

    def __init__(
        self,
        state: StoreState,
        namespace: NamespaceId,
        block_tokens: int,
        reserve_seconds: float,
        bound_histories: Callable[[bytes, bytes], None],
        *,
        rounded: bool = False,
    ) -> None:
        """`rounded`: rows are rounded to q8_0 before a block is visible. `bound_histories` is
        called with parent and tokens of each block that is one of perhaps many with its text.
        """
        self._state = state
        self.namespace = namespace
        self._block_tokens = block_tokens
        self._reserve_seconds = reserve_seconds
        self._bound_histories = bound_histories
        self._rounded = rounded
        self._lock = threading.Lock()
        self._pending: dict[int, _Pending] = {}  # under the lock: what is too old is taken away
        self._inline: _Inline | None = None
        self._until = 0.0  # (monotonic) what is offered may be waited for

    def reserve(self, offers: Sequence[BlockOffer]) -> list[Reserved]:
        """One answer per offer. After the first that is not taken none of the rest is either."""
        for offer in offers:
            check_offer(offer)
        if refusal := self._state.terms.of(self.namespace).refusal:
            return [Reserved(Outcome.REFUSED, reason=refusal)] * len(offers)
        answers: list[Reserved] = []
        self._begin_offers()
        for offer in offers:
            if answers and answers[-1].outcome in (Outcome.NO_ROOM, Outcome.REFUSED):
                answers.append(Reserved(answers[-1].outcome))
                continue
            pending = self._begin(offer)
            if isinstance(pending, Outcome):
                answers.append(Reserved(pending))
                continue
            reservation_id = next(self._ids)
            with self._lock:
                self._pending[reservation_id] = pending
            answers.append(Reserved(Outcome.RESERVED, reservation_id, pending.temp.path))
        return answers

    def commit(self, reservation_ids: Sequence[int]) -> list[CommitResult]:
        """Checks each filled file against its reservation and makes it visible."""
        results = []
        offers: list[BlockOffer] = []
        for reservation_id in reservation_ids:
            with self._lock:
                pending = self._pending.pop(reservation_id, None)
            if pending is None:
                results.append(CommitResult(False, "no such reservation, or it has expired"))
            else:
                results.append(self._commit(pending, verify=False))
                offers.append(pending.offer)
        self._touch(offers)
        return results

    def put_inline(self, key: BlockKey, part: bytes, *, last: bool) -> CommitResult | None:
        """One part of a block file; the answer comes with the last. NoRoom, InvalidBlock."""
        inline = self._inline
        if inline is None:
            deadline = self._state.clock() + self._reserve_seconds
            inline = self._inline = _Inline(key, bytearray(), deadline)
            self._begin_offers()
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
            if pending is None or inline.written_bytes != pending.offer.file_bytes:
                raise InvalidBlock("the block ends before its header says")
            inline.pending = None
            result = self._commit(pending, verify=True)
            self._touch([pending.offer])
            return result
        except BaseException:
            self._inline = None
            if inline.pending is not None:
                self._drop(inline.pending)
            raise

    def release_expired(self, now: float) -> int:
        with self._lock:
            over = [i for i, pending in self._pending.items() if pending.deadline <= now]
            dropped = [self._pending.pop(i) for i in over]
        for pending in dropped:
            self._drop(pending)
        return len(dropped)

    def close(self) -> None:
        with self._lock:
            left = list(self._pending.values())
            self._pending.clear()
        if self._inline is not None and self._inline.pending is not None:
            left.append(self._inline.pending)
            self._inline = None
        for pending in left:
            self._drop(pending)

    def _begin(self, offer: BlockOffer) -> _Pending | Outcome:
        state = self._state
        open_of_writer = len(self._pending)
        answer = entering.begin(state, offer.key, offer.parent, open_of_writer)
        if answer is OfferAnswer.PRESENT and not self._is_there(offer.key):
            answer = entering.begin(state, offer.key, offer.parent, open_of_writer)
        while answer is OfferAnswer.LEAVING and time.monotonic() < self._until:
            time.sleep(_ASK_AGAIN_SECONDS)
            answer = entering.begin(state, offer.key, offer.parent, open_of_writer)
        if isinstance(answer, str):
            seldom.warning("reservations", "reservation refused: %s", answer)
            return Outcome.NO_ROOM
        if answer is not OfferAnswer.WANTED:
            return Outcome.PRESENT if answer is OfferAnswer.PRESENT else Outcome.NO_ROOM
        pending: _Pending | Outcome = Outcome.NO_ROOM
        try:
            pending = self._find_room(offer)
        finally:
            if isinstance(pending, Outcome):
                entering.end(self._state, offer.key, offer.parent)
        return pending

    def _begin_offers(self) -> None:
        """Call it before blocks are begun: for so long one may wait for what is true of it."""
        chain_check.expand_all(self._state)
        self._until = time.monotonic() + chain_check.OFFER_SECONDS

    def _is_there(self, key: BlockKey) -> bool:
        """Whether the books are right about a block that is offered."""
        return chain_check.is_there(self._state, key, self._until)

    def _find_room(self, offer: BlockOffer) -> _Pending | Outcome:
        """Finds it in the first tier that has room and whose files a client may fill."""
        state = self._state
        outcome = Outcome.NO_ROOM
        for level in state.levels:
            if not level.tier.clients_open or state.suspended(level):
                continue
            if not state.admission.direct(offer.key, level):
                outcome = Outcome.REFUSED
                continue
            reservation = making_room.reserve(state, level, offer.file_bytes, self.namespace)
            if reservation is None:
                continue
            if not state.admission.charge(level, offer.file_bytes):
                reserving.release(state, reservation)
                outcome = Outcome.REFUSED
                continue
            try:
                temp = making_room.create_temp(
                    state, level, self.namespace, offer.key, offer.file_bytes, reservation
                )
            except OSError as error:
                state.admission.refund(level, offer.file_bytes)
                reserving.release(state, reservation)
                weather.failed(state, level, error, "reserve")
                continue
            deadline = state.clock() + self._reserve_seconds
            return _Pending(offer, level, temp, reservation, deadline, offer.file_bytes)
        return outcome

    def _touch(self, offers: Sequence[BlockOffer]) -> None:
        """Marks the chains as used that end with these, each once however many of its blocks."""
        parents = {offer.parent for offer in offers}
        entering.used(self._state, [one.key for one in offers if one.key not in parents])

    def _commit(self, pending: _Pending, *, verify: bool) -> CommitResult:
        state, level = self._state, pending.level
        try:
            if refusal := state.terms.of(self.namespace).refusal:
                raise InvalidBlock(refusal)  # since it was reserved
            with pending.temp.open() as block:
                meta = read_meta(block.read_at, block.file_bytes)
                check_meta(meta, pending.offer, self.namespace, self._block_tokens)
                if verify:
                    verify_payload(meta, block.read_at)
                if self._rounded:
                    transcode.round_rows(meta, block, pending.temp)
            record = record_of(meta, state.wall_clock())
            covered, rooted = entering.standing(state, record)
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
            seldom.warning("commit", said, pending.offer.key.hex(), error)
            return CommitResult(False, str(error))
        except OSError as error:
            weather.failed(state, level, error, "commit")
            with contextlib.suppress(OSError):  # renamed already, but perhaps not durable
                level.tier.remove(self.namespace, pending.offer.key)
            self._drop(pending)
            return CommitResult(False, f"{level.tier.kind.label} tier: {error.strerror or error}")
        pending.charged_bytes = 0  # written, whatever becomes of it
        tail = pending.offer.tail
        doomed = entering.entered(
            state, level, record, pending.reservation, stored_bytes, tail=tail, seconds=seconds
        )
        if doomed is None:
            with contextlib.suppress(OSError):
                level.tier.remove(self.namespace, record.key)
            self._drop(pending)
            return CommitResult(False, "the block before it was not stored")
        unlinking.unlink(state, doomed)
        if record.fingerprint:
            self._bound_histories(record.parent, record.tokens)
        state.work.set()
        return CommitResult(True)

    def _take_part(self, inline: _Inline, part: bytes) -> bool:
        """Writes what can be written. True when the block is stored already."""
        if inline.pending is not None:
            if inline.written_bytes + len(part) > inline.pending.offer.file_bytes:
                raise InvalidBlock("the block is longer than its header says")
            inline.pending.temp.write_at(inline.written_bytes, part)
            inline.written_bytes += len(part)
            return False
        if entering.is_stored(self._state, inline.key) and self._is_there(inline.key):
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
        offer = BlockOffer(inline.key, meta.parent, file_bytes, meta.rows < self._block_tokens)
        check_offer(offer)
        pending = self._begin(offer)
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
        unlinking.discard(pending.level, pending.temp)
        state.admission.refund(pending.level, pending.charged_bytes)
        offer = pending.offer
        doomed = entering.given_up(
            state, pending.level, offer.key, offer.parent, pending.reservation
        )
        unlinking.unlink(state, doomed)
