"""Which blocks may go to the disk, and which wait for it. The store holds the lock.

A block that is not admitted stays in RAM only and is lost when RAM evicts it. Whenever it is asked
for again, or the queue has run dry, it gets another chance.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable
from typing import TYPE_CHECKING, Final

from ollama_tiering.store.block.key import BlockKey
from ollama_tiering.store.books.policy import EAGER, PRESSURE, SECOND_TOUCH, StorePolicy
from ollama_tiering.store.books.tree import TOP_ONLY, BlockRecord
from ollama_tiering.store.tiers.daily_writes import DailyWrites

if TYPE_CHECKING:
    from ollama_tiering.store.books.state import Level, StoreState

_REST_SECONDS: Final = 10.0  # after the tier below had no room
MAX_WRITER_RESERVATIONS: Final = 4096  # open at once: each is a file, however small its block
MAX_RESERVATIONS: Final = 8192  # ... of all writers
_GHOSTS: Final = 1 << 16  # keys remembered of blocks that were offered once and not kept


class Admission:
    def __init__(self, state: StoreState, policy: StorePolicy, daily: DailyWrites) -> None:
        self._state = state
        self.policy = policy
        self.daily = daily
        self.refused: dict[str, int] = {}  # blocks by reason
        self._dropped: set[BlockKey] = set()  # in RAM only, and the queue had no room for them
        self._rest_until = 0.0
        self._ghosts: OrderedDict[BlockKey, None] = OrderedDict()

    def committed(self, record: BlockRecord, level: Level, *, tail: bool) -> None:
        if level.index == 0 and self.policy.admission != EAGER:
            return
        wait = self.policy.tail_seconds if tail else 0
        self.want(record, not_before=self._state.clock() + wait if wait else None)

    def used(self, leaf_to_root: Iterable[BlockRecord]) -> None:
        """Blocks were asked for: what is in RAM only is worth the disk now."""
        if self.policy.admission == PRESSURE or len(self._state.levels) == 1:
            return
        waiting = self._state.unsaved
        for record in leaf_to_root:
            if record.levels is TOP_ONLY and record.key not in waiting:
                self.want(record)
                return

    def press(self, level: Level, surplus_bytes: int) -> None:
        """RAM must evict that much: under `pressure` it is written down first."""
        if self.policy.admission != PRESSURE or level.index:
            return
        if self._state.clock() < self._rest_until:  # the tier below has no room: what is old goes
            return
        marked = self._state.unsaved.waiting_bytes
        for key in list(level.lru):
            if marked >= surplus_bytes:
                return
            record = self._state.tree.get(key)
            if record is not None and len(record.levels) == 1:
                self.want(record)
                marked = self._state.unsaved.waiting_bytes

    def holds(self, record: BlockRecord) -> bool:
        """Under `pressure` what is in RAM only is not evicted: it is written down first."""
        return (
            self.policy.admission == PRESSURE
            and record.levels is TOP_ONLY
            and self._state.clock() >= self._rest_until
            and not self._too_short(record)
        )

    def no_room(self, *keys: BlockKey) -> None:
        """The tier below may evict nothing for them: RAM need not keep them any longer."""
        self.not_now(*keys)
        self._refuse("no room")

    def not_now(self, *keys: BlockKey) -> None:
        """They cannot go down, and that may stay so for long."""
        for key in keys:
            self._state.unsaved.discard(key)
        self._dropped.update(keys)
        self._rest_until = self._state.clock() + _REST_SECONDS

    def refill(self) -> bool:
        """The queue is dry: takes again what did not fit, the most valuable first.

        Not what the disk had and gave up again: where RAM is larger than the disk's budget, writing
        one block would push out another for ever.
        """
        if not self._dropped or self.policy.admission != EAGER:
            return False
        if self._state.clock() < self._rest_until:
            return False
        state = self._state
        for key in reversed(state.levels[0].lru):
            if key not in self._dropped:
                continue
            record = state.tree.get(key)
            if record is not None and record.levels is TOP_ONLY:
                self.want(record, bounded=True)
                if key not in state.unsaved and not self._too_short(record):
                    break  # full again
            self._dropped.discard(key)
        return len(state.unsaved) > 0

    def forget(self, key: BlockKey) -> None:
        """The block is in no tier any more."""
        self._dropped.discard(key)

    def want(
        self, record: BlockRecord, *, bounded: bool = False, not_before: float | None = None
    ) -> None:
        """Queues the block and those before it. With `bounded` nothing is dropped for it."""
        state = self._state
        source = state.levels[min(record.levels)]
        below = state.below(source)
        if below is None or (below.shared is not None and not source.tier.is_volatile):
            return  # a shared tier takes from a disk above it when that is full
        if self._too_short(record):
            self._refuse("too short")
            return
        chain = [record] if record.key not in state.unsaved else []
        for before in state.tree.ancestors(record.parent):
            if before.key in state.unsaved or before.levels != record.levels:
                break  # those before it are where they must be, or the mover finds out
            chain.append(before)
        bound = self._bound_bytes(source)
        for one in reversed(chain):
            if len(one.levels) != 1 or source.index not in one.levels:
                continue
            full = bound and state.unsaved.waiting_bytes + one.file_bytes > bound
            if bounded and full and len(state.unsaved):
                return
            wait = not_before if one is record else None
            state.unsaved.add(one.key, one.file_bytes, not_before=wait)
        self.trim(source)
        state.work.set()

    def trim(self, source: Level) -> None:
        """Back to the queue's bound. What the disk needs stays: to be called when it needs less."""
        unsaved, bound = self._state.unsaved, self._bound_bytes(source)
        while bound and len(unsaved) > 1 and unsaved.waiting_bytes > bound:
            if not self._drop_one(source):
                return

    def direct(self, key: BlockKey, level: Level) -> bool:
        """Whether a writer may fill the block on this disk, because RAM has no room for it.

        Second touch then means: offered a second time. Lock not held.
        """
        if not level.tier.wears_disk or self.policy.admission != SECOND_TOUCH:
            return True
        with self._state.lock:
            if key in self._ghosts:
                del self._ghosts[key]
                return True
            self._ghosts[key] = None
            if len(self._ghosts) > _GHOSTS:
                self._ghosts.popitem(last=False)
            self._refuse("first touch")
        return False

    def reservations_full(self, of_writer: int) -> str:
        """Why a writer with `of_writer` open ones may not reserve; empty if it may. Lock held."""
        if of_writer >= MAX_WRITER_RESERVATIONS:
            reason = f"{of_writer} of this writer are open"
        elif len(self._state.writing) >= MAX_RESERVATIONS:
            reason = f"{len(self._state.writing)} are open"
        else:
            return ""
        self._refuse("too many reservations")
        return reason

    def charge(self, level: Level, written_bytes: int) -> bool:
        """Lock not held: the count may have to be written down."""
        if not level.tier.wears_disk or self.daily.charge(written_bytes):
            return True
        with self._state.lock:
            self._refuse("daily writes")
        return False

    def refund(self, level: Level, written_bytes: int) -> None:
        if level.tier.wears_disk:
            self.daily.refund(written_bytes)

    def exhausted(self, level: Level) -> bool:
        return level.tier.wears_disk and self.daily.exhausted

    def _too_short(self, record: BlockRecord) -> bool:
        # A window block's tokens are those of the block it hangs on.
        rows, least = 0 if record.window else record.rows, self.policy.min_tokens
        for one in self._state.tree.ancestors(record.parent) if rows < least else ():
            rows += one.rows
            if rows >= least:
                break
        return rows < least

    def _bound_bytes(self, source: Level) -> int:
        policy = self.policy
        bounds = [policy.queue_bytes] if policy.queue_bytes else []
        below = self._state.below(source)
        if policy.queue_seconds and below is not None and below.speed.write:
            bounds.append(int(policy.queue_seconds * below.speed.write))
        return max(1, min(bounds)) if bounds else 0

    def _drop_one(self, level: Level) -> bool:
        """Takes the least valuable block out of the queue: the one RAM would evict first."""
        state = self._state
        for key in level.lru:
            if key not in state.unsaved:
                continue
            children = state.tree.children(key)
            if any(one.key in state.unsaved or max(one.levels) > level.index for one in children):
                continue
            state.unsaved.discard(key)
            self._dropped.add(key)
            self._refuse("write queue full")
            return True
        return False

    def _refuse(self, reason: str) -> None:
        self.refused[reason] = self.refused.get(reason, 0) + 1
