"""TieredStore: the block store's policy over an ordered list of tiers, fastest first.

Thread-safe. One lock guards the books; it is never held during I/O. The store promises four things.
Budgets hold at all times, reservations included. Eviction never makes a hole in a chain. An OSError
deletes nothing. A damaged block is a miss, and is quarantined.
"""

from __future__ import annotations

import contextlib
import logging
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Final

from ollama_tiering.store.background import Background
from ollama_tiering.store.block.description import namespace_text
from ollama_tiering.store.block.key import BlockExtra, BlockKey, NamespaceId, namespace_digest
from ollama_tiering.store.books import histories, shared_work
from ollama_tiering.store.books.encodings import TierEncodings
from ollama_tiering.store.books.policy import StorePolicy
from ollama_tiering.store.books.report import (
    AbsentTier,
    Leased,
    LeasedBlock,
    LeftOver,
    MatchedBlock,
    StoreReport,
)
from ollama_tiering.store.books.reporting import report_of
from ollama_tiering.store.books.state import StoreState
from ollama_tiering.store.books.terms import Decide
from ollama_tiering.store.books.writing_down import only_in_ram
from ollama_tiering.store.errors import InvalidBlock
from ollama_tiering.store.serving import lookup
from ollama_tiering.store.serving.leasing import Leaser, Leasing
from ollama_tiering.store.serving.sequence_end import remove_end
from ollama_tiering.store.serving.session import WriteSession
from ollama_tiering.store.tiers.contract import Tier, TierKind
from ollama_tiering.store.tiers.daily_writes import DailyWrites
from ollama_tiering.store.upkeep import damage, making_room, opening, resize
from ollama_tiering.store.upkeep.graveyard import Graveyard
from ollama_tiering.store.upkeep.index import BlockIndex
from ollama_tiering.store.upkeep.index_keeper import IndexKeeper
from ollama_tiering.store.upkeep.mover import Mover
from ollama_tiering.store.upkeep.opening import learn_described
from ollama_tiering.store.upkeep.pinbook import PIN_SHARE, PinBook
from ollama_tiering.store.upkeep.probing import measure_levels
from ollama_tiering.store.upkeep.remote_mover import of_shared_level
from ollama_tiering.store.upkeep.removal import remove_chains
from ollama_tiering.store.upkeep.survey import Survey
from ollama_tiering.store.upkeep.withdrawal import Withdrawal

log = logging.getLogger(__name__)

_FLUSH_SECONDS: Final = 2.0
_SAVE_SECONDS: Final = 5.0  # for the index, after a drain that took all of its time
MAX_DESCRIPTION_CHARACTERS: Final = 64 << 10  # a model of 1000 layers has 20 thousand


class TieredStore:
    """Opened by the constructor, which scans the tiers, and ended by `close`.

    `tiers` are pairs (tier, budget in bytes), fastest first. With `background` a thread moves
    blocks; without it, `run_pending` does so when the caller wants. `absent_remote` is the
    directory of a remote tier that is configured but was not opened.
    """

    def __init__(
        self,
        tiers: Sequence[tuple[Tier, int]],
        *,
        index_path: Path | None = None,
        high_watermark: float = 0.95,
        low_watermark: float = 0.85,
        lease_seconds: float = 60.0,
        reserve_seconds: float = 120.0,
        staging_seconds: float = 5.0,
        rescan_seconds: float = 120.0,
        pin_share: float = PIN_SHARE,
        index_type: type[BlockIndex] = BlockIndex,
        background: bool = True,
        measure: bool = True,
        policy: StorePolicy | None = None,
        encodings: TierEncodings | None = None,
        decide: Decide | None = None,
        absent_remote: Path | None = None,
        clock: Callable[[], float] = time.monotonic,
        wall_clock: Callable[[], float] = time.time,
    ) -> None:
        if not tiers:
            raise ValueError("a store needs a tier")
        policy = policy or StorePolicy()
        self._daily = DailyWrites.of(tiers, policy.daily_write_bytes, wall_clock)
        self._state = StoreState(
            tiers,
            encodings=encodings,
            clock=clock,
            wall_clock=wall_clock,
            policy=policy,
            daily=self._daily,
            decide=decide,
        )
        self.reserve_seconds = reserve_seconds
        index = index_type(index_path) if index_path is not None else None
        self._keeper = IndexKeeper(self._state, index)
        self._sessions: set[WriteSession] = set()
        self._closed = False
        self._background = Background(self._state, self._begin, self._step)
        self._mover = Mover(self._state, high_watermark=high_watermark, low_watermark=low_watermark)
        self._leaser = Leaser(
            self._state,
            self._mover.copy,
            lease_seconds=lease_seconds,
            deadline_seconds=min(staging_seconds, lease_seconds),
        )
        own = [v.tier.directory for v in self._state.levels if v.shared is None]
        learn_described(self._state.terms, own)  # before anything is served
        opening.keep_headroom(self._state, index_path)
        absent = absent_remote is not None
        rows = opening.load(self._state, index, absent_remote=absent)
        self.pins = PinBook(self._state, pin_share)
        self.graveyard = Graveyard(self._state, self.pins.home, rows.values(), absent_remote)
        try:
            self.pins.load()  # before anything may be evicted
            self.graveyard.load()  # before the remote tier is looked at
        except BaseException:
            self._keeper.close()
            raise
        self._withdrawal = Withdrawal(self._state, self.pins, self.graveyard, self._keeper.scrub)
        survey = Survey(self._state, self._background.stop, then=self.pins.enforce)
        self._remote = of_shared_level(
            self._state,
            rows,
            self.graveyard,
            period_seconds=rescan_seconds,
            high_watermark=high_watermark,
            low_watermark=low_watermark,
        )
        self.left_out: tuple[AbsentTier, ...] = ()  # of the settings, but not to be had now
        self.hangs = False  # it could not be closed whole: what is open ends with the process
        self._measure = measure
        self._flushed = 0.0
        if not background:
            survey.run()
            self.graveyard.hide()
        else:
            self._background.count_files(survey)
        for level in self._state.levels:  # a budget made smaller holds from the start
            making_room.shrink(self._state, level)
        if background:
            self._background.start()
            if self._remote is not None:
                self._remote.start()

    @property
    def state(self) -> StoreState:
        """The books, for the store's own tools."""
        return self._state

    # --- reading -------------------------------------------------------------------------------

    def match(
        self,
        namespace: NamespaceId,
        keys: Sequence[BlockKey],
        tokens: bytes,
        block_tokens: int,
    ) -> list[MatchedBlock]:
        """The leading run of whole blocks, then the best child that matches in part. This counts as
        use.
        """
        return lookup.match(self._state, namespace, keys, tokens, block_tokens)

    def find_history(
        self,
        namespace: NamespaceId,
        tokens: bytes,
        block_tokens: int,
        extras: Sequence[BlockExtra] = (),
        fingerprints: Sequence[bytes] = (),
        least_tokens: int = 0,
    ) -> tuple[list[MatchedBlock], Callable[[], None]]:
        """Works as `match`, where the tokens do not decide the bits of rows; see
        lookup.find_history. It counts only when the second value is called.
        """
        return lookup.find_history(
            self._state, namespace, tokens, block_tokens, extras, fingerprints, least_tokens
        )

    def refusal(self, namespace: NamespaceId) -> str:
        """Why nothing of this model is stored or served; empty: it is."""
        return self._state.terms.of(namespace).refusal

    def match_in_pieces(
        self,
        namespace: NamespaceId,
        keys: Sequence[BlockKey],
        tokens: bytes,
        block_tokens: int,
    ) -> Iterator[list[MatchedBlock]]:
        """Works as `match`, one bounded piece of work at a time; see lookup.match_in_pieces."""
        return lookup.match_in_pieces(self._state, namespace, keys, tokens, block_tokens)

    def lease(self, namespace: NamespaceId, keys: Sequence[BlockKey]) -> Leased:
        """Leases the leading run of `keys` that is stored, until `release` or the end of the lease.
        Blocks that need it are staged first. The run ends, as at a miss, before the first block
        that cannot be staged in time.
        """
        return self.begin_lease(namespace, keys).wait()

    def begin_lease(self, namespace: NamespaceId, keys: Sequence[BlockKey]) -> Leasing:
        """Works as `lease`, for a caller that takes each block when it is ready."""
        return self._leaser.begin(namespace, keys)

    def begin_lease_in_pieces(
        self, namespace: NamespaceId, keys: Sequence[BlockKey]
    ) -> tuple[int, Iterator[Leasing]]:
        """Works as `begin_lease`, some blocks at a time: the lease's id, and the pieces."""
        return self._leaser.begin_in_pieces(namespace, keys)

    def renew(self, lease_id: int) -> bool:
        """A lease lasts as long again, from now on. False when it has ended already."""
        return self._leaser.renew(lease_id)

    def release(self, lease_id: int) -> None:
        """Ends a lease. A lease that has ended already is no error."""
        self._leaser.release(lease_id)

    def read_part(self, block: LeasedBlock, offset: int, length: int) -> bytes:
        """Bytes of a leased block, for a client that cannot open its file. OSError passes."""
        levels = self._state.levels
        tier = next(level.tier for level in levels if level.tier.kind is block.tier)
        with tier.open(block.namespace, block.key) as stored:
            return stored.read_at(offset, length)

    # --- writing -------------------------------------------------------------------------------

    def open_session(
        self, namespace: NamespaceId, fields: Sequence[tuple[str, str]], block_tokens: int
    ) -> WriteSession:
        """A writer for one namespace. InvalidBlock if `fields` do not give that namespace."""
        if sum(len(name) + len(value) for name, value in fields) > MAX_DESCRIPTION_CHARACTERS:
            raise InvalidBlock("the description of the namespace is too long")
        if namespace_digest(fields) != namespace:
            raise InvalidBlock("the namespace is not the digest of its description")
        if dict(fields).get("block_tokens") != str(block_tokens):
            raise InvalidBlock(f"block_tokens {block_tokens} is not what the namespace says")
        namespace_text(fields)  # or InvalidBlock
        self._state.terms.learn_described(namespace, fields)
        rounded = self._state.encodings.note(namespace, fields)
        for level in self._state.levels:
            if level.shared is not None:
                shared_work.to_describe(self._state, level, namespace, fields)
            else:
                making_room.describe(self._state, level, namespace, fields)
        session = WriteSession(
            *(self._state, namespace, block_tokens),
            *(self.reserve_seconds, self._bound_histories),
            rounded=rounded,
        )
        self._sessions.add(session)
        return session

    def open_namespaces(self) -> set[NamespaceId]:
        """Namespaces with open writers: more blocks may follow."""
        return {session.namespace for session in list(self._sessions)}

    def close_session(self, session: WriteSession) -> None:
        self._sessions.discard(session)
        session.close()

    def remove_seq(self, namespace: NamespaceId, keys: Sequence[BlockKey]) -> tuple[int, int]:
        """Removes the end of a chain, up to what another sequence needs; returns (blocks, bytes).
        It waits for a block that is being written down, and stops at one that stays leased.
        """
        return remove_end(self._state, self.graveyard, namespace, keys)

    def _bound_histories(self, parent: bytes, tokens: bytes) -> None:
        """After a block with these tokens was stored: of too many histories of one text the one
        that was used least recently goes.
        """
        if ends := histories.surplus_ends(self._state, parent, tokens):
            remove_chains(self._state, ends, self.graveyard, dry_run=False, own_only=True)

    def report_corrupt(self, namespace: NamespaceId, key: BlockKey) -> bool:
        """Reads the block again. True if a copy of it was damaged and is now quarantined."""
        return damage.check(self._state, namespace, key)

    # --- the rest ------------------------------------------------------------------------------

    def report(self) -> StoreReport:
        return report_of(self._state, self._daily, self.left_out)

    def mover_silent_seconds(self) -> float:
        """Seconds since the background thread last began a piece of work; 0 if
        there is no thread.
        """
        return self._background.silent_seconds()

    def set_budget(self, kind: TierKind, budget_bytes: int) -> int:
        """Sets a budget at once. Returns the bytes above it that cannot be evicted yet. ValueError:
        see resize.set_budget.
        """
        over_bytes = resize.set_budget(self._state, kind, budget_bytes)
        self.pins.enforce()
        return over_bytes

    def learn_model(self, namespace: NamespaceId, model: str) -> None:
        """Notes the model of a namespace that a runner reports before there is a description. May
        block.
        """
        self._state.terms.learn(namespace, model, sure=False)

    def set_terms(self, decide: Decide) -> None:
        """Applies changed rules, or changed names of models, from now on."""
        self._state.terms.redo(decide)
        self._state.work.set()

    def set_watermarks(self, high: float, low: float) -> None:
        self._mover.set_watermarks(high, low)
        self._state.work.set()

    def run_pending(self, *, deadline: float | None = None) -> None:
        """Moves blocks until nothing is left to move or the (clock) deadline has passed."""
        while deadline is None or self._state.clock() < deadline:
            self.pins.settle()
            busy = self._withdrawal.run() or self._mover.step()
            if self._remote is not None:
                busy = self._remote.step() or busy
            if not busy:
                return

    def flush_index(self) -> None:
        self._keeper.flush()

    def rebuild_index(self) -> None:
        """Makes the next flush throw the index away and write it anew from the books."""
        self._keeper.rebuild()

    def scrub_index(self) -> None:
        """Afterwards none of the index's files holds a token of what was removed."""
        self._keeper.scrub()

    def close(self, drain_seconds: float = 10.0) -> LeftOver:
        """Stops the store. It writes down what it can in that time, and returns what was left."""
        if self._closed:
            return LeftOver(0, 0)
        self._closed = True
        deadline = self._state.clock() + drain_seconds
        self._background.end(deadline)
        if self._remote is not None and not self._remote.finish(drain_seconds):
            self._remote = None
        self._leaser.close()
        left_seconds = max(0.0, deadline - self._state.clock()) + _SAVE_SECONDS
        finish = threading.Thread(target=self._finish, args=(deadline,), daemon=True)
        finish.start()
        finish.join(left_seconds)
        left = LeftOver(*only_in_ram(self._state))
        if finish.is_alive():
            log.warning("a disk hangs: what is open now ends with the process")
            self.hangs = True
            return left
        for level in self._state.levels:
            level.tier.close()
        return left

    def _finish(self, deadline: float) -> None:
        """The part of closing that may hang."""
        with contextlib.ExitStack() as closing:
            closing.callback(self._keeper.close)
            closing.callback(self._daily.close)
            closing.callback(self._mover.close)
            for session in list(self._sessions):
                self.close_session(session)
            self._background.wait()
            self._mover.drain(deadline)
            self.flush_index()

    def _begin(self) -> None:
        """What the background thread does once, at its start."""
        self.pins.take_over()
        self.graveyard.flush(now=True)
        if self._measure:
            measure_levels(self._state)
        self._flushed = self._state.clock()

    def _step(self) -> bool:
        """One piece of the background thread's work; returns whether there is more."""
        self.pins.settle()
        busy = self._withdrawal.run() or self._mover.step()
        now = self._state.clock()
        for session in list(self._sessions):
            session.release_expired(now)
        if now - self._flushed >= _FLUSH_SECONDS:
            self.flush_index()
            self._flushed = now
        return busy
