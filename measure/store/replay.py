"""A trace replayed on the books of a store: the same rules and orders, but no bytes."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Final

from measure.store import samples
from measure.store.traces import BLOCK_TOKENS, REAL_TOKENS, Ask
from ollama_tiering.store import MemoryTier, TierKind
from ollama_tiering.store.block.key import (
    TOKEN_BYTES,
    BlockKey,
    block_key,
    prefix_chain,
    tokens_to_bytes,
)
from ollama_tiering.store.books import copies, entering, reserving, writing_down
from ollama_tiering.store.books.lru import ByteLru, Reservation
from ollama_tiering.store.books.state import Level, StoreState
from ollama_tiering.store.books.tree import BlockRecord, BlockTree
from ollama_tiering.store.serving import lookup

__all__ = ["BlockTree", "ByteLru", "Found", "Replay", "entering"]

NS: Final = samples.namespace("replay", block_tokens=BLOCK_TOKENS, layers=1)
NAMESPACE: Final = NS.digest()
LEAST_NEW: Final = 64 // REAL_TOKENS  # fewer tokens beyond those in memory are not looked up


@dataclass(slots=True)
class Found:
    """Real tokens."""

    asked: int = 0
    matched: int = 0
    live_asked: int = 0  # of the conversation that is watched; but for what is new each time
    live_matched: int = 0
    written: int = 0  # to the disk

    @property
    def live_share(self) -> float:
        return self.live_matched / self.live_asked if self.live_asked else 0.0

    @property
    def share(self) -> float:
        return self.matched / self.asked if self.asked else 0.0


class Replay:
    """A store with budgets of so many real tokens in RAM and on the disk; 0 leaves a tier out. One
    slot: a prompt that goes on where the last one ended is asked for only as Ollama would.
    """

    def __init__(self, ram: int, disk: int, lru: type[ByteLru[BlockKey]] = ByteLru) -> None:
        kinds = ((TierKind.RAM, ram), (TierKind.LOCAL, disk))
        tiers = [(MemoryTier(kind), budget // REAL_TOKENS) for kind, budget in kinds if budget]
        self._now = 1000.0
        self.state = StoreState(tiers, clock=lambda: self._now, wall_clock=lambda: self._now)
        for level in self.state.levels:
            level.lru = lru(level.lru.budget_bytes)
        self.found = Found()
        self._slot: tuple[int, ...] = ()
        self._before: dict[bool, tuple[int, ...]] = {}

    def all(self, trace: Iterable[Ask]) -> Found:
        for ask in trace:
            self.ask(ask)
        return self.found

    def ask(self, ask: Ask) -> None:
        self._now += 60.0
        in_slot = _common(self._slot, ask.prompt)
        if len(ask.prompt) - 1 - in_slot >= LEAST_NEW:
            data = tokens_to_bytes(ask.prompt)
            keys = prefix_chain(NAMESPACE, data, BLOCK_TOKENS)
            found = lookup.match(self.state, NAMESPACE, keys, data, BLOCK_TOKENS)
            matched = min(sum(block.rows for block in found), len(ask.prompt) - 1)
            self.found.asked += REAL_TOKENS * len(ask.prompt)
            self.found.matched += REAL_TOKENS * matched
            if ask.live and (before := self._before.get(True)):
                known = _common(before, ask.prompt)
                self.found.live_asked += REAL_TOKENS * known
                self.found.live_matched += REAL_TOKENS * min(matched, known)
        self._slot = (*ask.prompt, *ask.answer)
        self._before[ask.live] = self._slot
        self._store(self._slot)
        self._write_down()

    def _store(self, tokens: Sequence[int]) -> None:
        data = tokens_to_bytes(tokens)
        step = BLOCK_TOKENS * TOKEN_BYTES
        keys = list(prefix_chain(NAMESPACE, data, BLOCK_TOKENS))
        parent: bytes = keys[-1] if keys else NAMESPACE
        if len(data) % step:
            keys.append(block_key(parent, data[len(keys) * step :]))
        parent = NAMESPACE
        present = True
        for number, key in enumerate(keys):
            own = data[number * step : (number + 1) * step]
            following = keys[number + 1] if number + 1 < len(keys) else None
            if present and following is not None and entering.is_stored(self.state, following):
                parent = key
                continue  # only the last that is stored is offered: the order is the same
            if not self._enter(key, parent, own):
                break
            present, parent = False, key
        entering.used(self.state, [BlockKey(parent)])

    def _enter(self, key: BlockKey, parent: bytes, own: bytes) -> bool:
        """Whether the block is stored now."""
        state, level = self.state, self.state.levels[0]
        answer = entering.begin(state, key, parent, 0)
        if answer is not entering.OfferAnswer.WANTED:
            return answer is entering.OfferAnswer.PRESENT
        rows = len(own) // TOKEN_BYTES
        record = BlockRecord(key, NAMESPACE, parent, own, rows, rows, self._now)
        covered, _ = entering.standing(state, record)
        reservation = None if covered else self._room(level, rows)
        if reservation is None:
            entering.end(state, key, parent)
            return False
        doomed = entering.entered(
            state, level, record, reservation, rows, tail=rows < BLOCK_TOKENS, seconds=0.0
        )
        for one in doomed or ():
            copies.gone(state, one, unlinked=True)
        return doomed is not None

    def _room(self, level: Level, tokens: int) -> Reservation[BlockKey] | None:
        while True:
            found = reserving.reserve_or_victims(self.state, level, tokens)
            if isinstance(found, Reservation):
                return found
            if not found:
                return None
            for one in found:
                copies.gone(self.state, one, unlinked=True)

    def _write_down(self) -> None:
        """All that waits, and then RAM down to its low watermark."""
        state, trimming = self.state, set[int]()
        if len(state.levels) == 1:
            return
        while batch := writing_down.next_batch(state, 32, 32, 1 << 30):
            done = 0
            for job in batch.jobs:
                reservation = self._room(job.target, job.record.file_bytes)
                if reservation is None:
                    break
                size = job.record.file_bytes
                file = copies.CopiedFile(size, size, False, 0.0, size, 0.0)
                copies.copied(state, job.record, job.source, job.target, reservation, file)
                self.found.written += REAL_TOKENS * size
                done += 1
            copies.let_go(state, batch.held)
            failure = writing_down.Failure.NO_ROOM if done < len(batch.jobs) else None
            if not writing_down.written(state, batch, done, failure) or not batch.jobs:
                break
        for one in writing_down.trim(state, state.levels[0], 0.95, 0.85, trimming):
            copies.gone(state, one, unlinked=True)


def _common(one: Sequence[int], other: Sequence[int]) -> int:
    pairs = enumerate(zip(one, other, strict=False))
    return next((at for at, (a, b) in pairs if a != b), min(len(one), len(other)))
