"""The store against a dict: put, match, get, evict, demote, damage, crash, restart in any order.

Invariants after every step: budgets hold, no chain has a hole that eviction made, what is given out
is byte for byte what was put, nothing that was not put is matched.
"""

from __future__ import annotations

import contextlib
import os
from dataclasses import replace
from pathlib import Path

from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
)

from measure.store import samples
from ollama_tiering.store.block.blockfile import BlockMeta, buffer_reader, read_meta
from ollama_tiering.store.block.encoding import Encoding
from ollama_tiering.store.block.key import (
    BlockKey,
    prefix_chain,
    tokens_to_bytes,
)
from ollama_tiering.store.books.encodings import TierEncodings
from ollama_tiering.store.books.policy import EAGER, PRESSURE, SECOND_TOUCH, StorePolicy
from ollama_tiering.store.books.terms import Decide, Terms
from ollama_tiering.store.books.tree import BlockRecord
from ollama_tiering.store.serving.session import Outcome, WriteSession
from ollama_tiering.store.tiered import TieredStore
from ollama_tiering.store.tiers.contract import Tier, TierKind
from ollama_tiering.store.tiers.directory import FsTier
from ollama_tiering.store.tiers.memory import MemoryTier
from tests.places import short_directory
from tests.tokens import tokens_from_bytes

NS = samples.namespace(layers=1, head_dim=2048)  # wide rows: a whole block has what to encode
BLOCK_TOKENS = int(NS.block_tokens)
FILE_BYTES = len(samples.sequence(NS, [0] * BLOCK_TOKENS)[0].data)
LEASE_SECONDS = 60
SOAK = int(os.environ.get("TIERING_SOAK", "1"))  # `make soak` takes a hundred times as many steps
OTHER_BYTES = 28 << 10  # lock, description, count of today's writes
TOKENS = st.lists(st.integers(0, 1), min_size=1, max_size=22)


class StoreMachine(RuleBasedStateMachine):
    """Two memory tiers that outlive the store, as tmpfs and a disk outlive the sidecar."""

    def __init__(self) -> None:
        super().__init__()
        self.now = 1000.0
        self.wall = 1_763_700_000.0
        self.policy = StorePolicy()
        self.put: dict[BlockKey, bytes] = {}
        self.damaged: set[BlockKey] = set()
        self.session: WriteSession | None = None
        self.leases: dict[int, tuple[float, list[BlockKey]]] = {}

    @initialize(
        ram=st.integers(1, 6),
        local=st.integers(0, 8),
        admission=st.sampled_from([EAGER, SECOND_TOUCH, PRESSURE]),
        queue=st.integers(0, 3),
        daily=st.sampled_from([0, 4, 40]),
        ttl_seconds=st.sampled_from([0, 700, 5000]),
    )
    def start(
        self, ram: int, local: int, admission: str, queue: int, daily: int, ttl_seconds: int
    ) -> None:
        self.policy = StorePolicy(
            admission=admission,
            queue_bytes=queue * FILE_BYTES,
            daily_write_bytes=daily * FILE_BYTES,
            ttl_seconds=ttl_seconds,
            tail_seconds=5,
        )
        self.tiers = self.make_tiers(ram * FILE_BYTES, local * FILE_BYTES)
        self.open()

    def make_tiers(self, ram_bytes: int, local_bytes: int) -> list[tuple[Tier, int]]:
        tiers: list[tuple[Tier, int]] = [(MemoryTier(TierKind.RAM), ram_bytes)]
        if local_bytes:
            tiers.append((MemoryTier(TierKind.LOCAL), local_bytes))
        return tiers

    def encodings(self) -> TierEncodings | None:
        return None

    def open(self) -> None:
        self.store = TieredStore(
            self.tiers,
            background=False,
            measure=False,
            policy=self.policy,
            encodings=self.encodings(),
            decide=self.decide(),
            clock=lambda: self.now,
            wall_clock=lambda: self.wall,
            lease_seconds=LEASE_SECONDS,
        )
        self.session = self.store.open_session(NS.digest(), NS.fields(), BLOCK_TOKENS)
        self.leases = {}

    def decide(self) -> Decide | None:
        return None

    @rule(tokens=TOKENS, keep=st.booleans())
    def put_sequence(self, tokens: list[int], keep: bool) -> None:
        assert self.session is not None
        blocks = samples.sequence(NS, tokens)
        answers = self.session.reserve([block.offer for block in blocks])
        ids = []
        for block, answer in zip(blocks, answers, strict=True):
            if answer.outcome is not Outcome.RESERVED:
                continue
            pending = self.session._pending[answer.reservation_id]
            pending.temp.write_at(0, block.data)
            ids.append((answer.reservation_id, block))
        if not keep:
            self.store.close_session(self.session)
            self.session = self.store.open_session(NS.digest(), NS.fields(), BLOCK_TOKENS)
            return
        results = self.session.commit([reservation_id for reservation_id, _ in ids])
        assert all(result.stored for result in results), results
        for _, block in ids:
            self.put[block.key] = block.data
            self.damaged.discard(block.key)

    @rule(pick=st.integers(0, 1000), first=st.integers(0, BLOCK_TOKENS - 1))
    def hang_a_window(self, pick: int, first: int) -> None:
        """On any block of a chain."""
        assert self.session is not None
        chain = sorted(record.key for record in self.store._state.tree if not record.window)
        if not chain:
            return
        meta = meta_of(self.put[chain[pick % len(chain)]])
        tokens = tokens_from_bytes(meta.tokens)
        on = samples.SampleBlock(meta.key, meta.parent, meta.rows, False, b"")
        first = min(first, meta.rows - 1)
        window = samples.window(NS, on, tokens, meta.first_position, first)
        (answer,) = self.session.reserve([window.offer])
        if answer.outcome is not Outcome.RESERVED:
            return
        self.session._pending[answer.reservation_id].temp.write_at(0, window.data)
        (result,) = self.session.commit([answer.reservation_id])
        assert result.stored, result
        self.put[window.key] = window.data
        self.damaged.discard(window.key)

    @rule(tokens=TOKENS)
    def look_up(self, tokens: list[int]) -> None:
        data = tokens_to_bytes(tokens)
        chain = prefix_chain(NS.digest(), data, BLOCK_TOKENS)
        found = self.store.match(NS.digest(), chain, data, BLOCK_TOKENS)
        at = 0
        for index, block in enumerate(found):
            assert not meta_of(self.put[block.key]).cells
            stored = tokens_of(self.put[block.key])
            assert 1 <= block.rows <= block.block_rows == len(stored)
            assert stored[: block.rows] == tokens[at : at + block.rows]
            assert index == len(found) - 1 or block.rows == BLOCK_TOKENS
            at += block.rows
            hanging = self.store._state.tree.windows(block.key)
            assert sorted(one.key for one in block.attached) == sorted(r.key for r in hanging)
        names = [block.key for block in found]
        names += [one.key for block in found for one in block.attached]
        leased = self.store.lease(NS.digest(), names)
        keys = []
        for held in leased.blocks:
            content = self.store.read_part(held, 0, held.file_bytes)
            if content == self.put[held.key]:
                keys.append(held.key)
            else:  # a lease does not keep what is damaged
                assert held.key in self.damaged
                assert self.store.report_corrupt(NS.digest(), held.key)
        self.leases[leased.lease_id] = (self.now + LEASE_SECONDS, keys)

    @rule()
    def release_all(self) -> None:
        for lease_id in self.leases:
            self.store.release(lease_id)
        self.leases = {}

    @rule(seconds=st.integers(1, 100))
    def let_time_pass(self, seconds: int) -> None:
        self.now += seconds
        self.wall += seconds
        self.leases = {i: held for i, held in self.leases.items() if held[0] > self.now}

    @rule(seconds=st.sampled_from([-1e8, -1e5, -60, 60, 1e5, 1e8]))
    def set_the_clock(self, seconds: float) -> None:
        self.wall = max(0.0, self.wall + seconds)

    @rule(level=st.integers(0, 1), blocks=st.integers(1, 8))
    def change_the_budget(self, level: int, blocks: int) -> None:
        """Once leases have ended and the work is done the new one holds."""
        if level >= len(self.tiers):
            return
        self.release_all()
        self.set_budget(level, blocks * FILE_BYTES)
        with self.store._state.lock:
            self.store._state.levels[level].lru.budget_bytes = self.tiers[level][1]
        self.now += 20  # past any rest
        self.wall += 20
        self.store.run_pending()

    def set_budget(self, level: int, budget: int) -> None:
        self.tiers[level] = (self.tiers[level][0], budget)

    @rule()
    def move(self) -> None:
        self.store.run_pending()

    @rule(tokens=TOKENS)
    def remove(self, tokens: list[int]) -> None:
        keys = [block.key for block in samples.sequence(NS, tokens)]
        self.store.remove_seq(NS.digest(), keys)

    @rule(pick=st.integers(0, 1000), level=st.integers(0, 1))
    def flip_a_bit(self, pick: int, level: int) -> None:
        if level < len(self.tiers):
            tier = self.tiers[level][0]
            assert isinstance(tier, MemoryTier)
            if tier.blocks:
                place = sorted(tier.blocks)[pick % len(tier.blocks)]
                content = bytearray(tier.blocks[place])
                content[4096] ^= 4
                tier.blocks[place] = bytes(content)
                self.damaged.add(place[1])

    @precondition(lambda self: not self.leases)
    @rule()
    def crash_and_restart(self) -> None:
        self.session = None
        self.open()

    @rule()
    def stop_and_start(self) -> None:
        left = self.store.close(drain_seconds=10)
        assert left.blocks >= 0
        self.open()

    @invariant()
    def budgets_hold(self) -> None:
        for tier, budget in getattr(self, "tiers", []):
            assert isinstance(tier, MemoryTier)
            held = sum(map(len, tier.blocks.values())) + sum(map(len, tier.bad.values()))
            held += sum(temp.file_bytes for temp in tier.writing.values())
            assert held <= budget
        for report in self.store.report().tiers if hasattr(self, "store") else []:
            assert report.used_bytes + report.reserved_bytes <= report.budget_bytes

    @invariant()
    def books_equal_the_tiers(self) -> None:
        if not hasattr(self, "store"):
            return
        for level in self.store._state.levels:
            assert isinstance(level.tier, MemoryTier)
            assert {key for _, key in level.tier.blocks} == set(level.lru)
            for key in level.lru:
                record = self.store._state.tree.get(key)
                assert record is not None
                assert level.index in record.levels

    @invariant()
    def what_each_model_takes_is_counted(self) -> None:
        for level in self.store._state.levels if hasattr(self, "store") else []:
            held = sum(level.lru.stored_bytes(key) for key in level.lru)
            assert level.held_bytes == ({NS.digest(): held} if held else {})

    @invariant()
    def leased_blocks_are_there(self) -> None:
        for _, keys in self.leases.values():
            for key in keys:
                assert key in self.damaged or key in self.store._state.tree

    @invariant()
    def no_chain_has_a_hole(self) -> None:
        """Except where damage or a crash of the writer made it."""
        if self.damaged or not hasattr(self, "store"):
            return
        tree = self.store._state.tree
        for record in tree:
            if record.parent != NS.digest():
                assert BlockKey(record.parent) in tree

    @invariant()
    def the_queue_holds_what_is_in_ram_only(self) -> None:
        if not hasattr(self, "store"):
            return
        state = self.store._state

        def is_needed(record: BlockRecord) -> bool:
            """Something below it is on the disk already: it must follow, full queue or not."""
            children = state.tree.children(record.key)
            return any(max(one.levels) > 0 or is_needed(one) for one in children)

        waiting = [record for key in state.unsaved if (record := state.tree.get(key))]
        assert len(waiting) == len(state.unsaved)
        assert state.unsaved.waiting_bytes == sum(record.file_bytes for record in waiting)
        if self.policy.queue_bytes:
            free = [record.file_bytes for record in waiting if not is_needed(record)]
            assert sum(free) <= max(self.policy.queue_bytes, FILE_BYTES)

    @invariant()
    def the_day_is_not_overdrawn(self) -> None:
        for report in self.store.report().tiers if hasattr(self, "store") else []:
            if report.daily_write_bytes:
                assert report.written_today_bytes <= report.daily_write_bytes


def tokens_of(data: bytes) -> list[int]:
    return tokens_from_bytes(meta_of(data).tokens)


def meta_of(data: bytes) -> BlockMeta:
    return read_meta(buffer_reader(data), len(data))


class FsStoreMachine(StoreMachine):
    """The same over directories, with an index that outlives crashes."""

    def make_tiers(self, ram_bytes: int, local_bytes: int) -> list[tuple[Tier, int]]:
        # On tmpfs directories take no blocks: budgets can be counted in whole blocks.
        self.left = contextlib.ExitStack()
        self.directory = self.left.enter_context(short_directory(in_memory=True))
        self.budgets = (ram_bytes, local_bytes)
        return []

    def open(self) -> None:
        for tier, _ in self.tiers:
            tier.close()
        root = self.directory
        kinds = (TierKind.RAM, TierKind.LOCAL)
        self.tiers = [
            (FsTier(kind, root / kind.label), budget + OTHER_BYTES)
            for kind, budget in zip(kinds, self.budgets, strict=True)
            if budget
        ]
        self.store = TieredStore(
            self.tiers,
            index_path=root / "index.sqlite",
            background=False,
            measure=False,
            policy=self.policy,
            encodings=self.encodings(),
            clock=lambda: self.now,
            wall_clock=lambda: self.wall,
            lease_seconds=LEASE_SECONDS,
        )
        self.session = self.store.open_session(NS.digest(), NS.fields(), BLOCK_TOKENS)
        self.leases = {}

    @rule()
    def flush(self) -> None:
        self.store.flush_index()

    @rule(pick=st.integers(0, 1000), level=st.integers(0, 1))
    def flip_a_bit(self, pick: int, level: int) -> None:
        if level < len(self.tiers) and (files := self.files(level)):
            file = files[pick % len(files)]
            content = bytearray(file.read_bytes())
            content[4096] ^= 4
            file.chmod(0o600)
            file.write_bytes(content)
            self.damaged.add(BlockKey(bytes.fromhex(file.stem)))

    def set_budget(self, level: int, budget: int) -> None:
        budgets = list(self.budgets)
        budgets[level] = budget
        self.budgets = (budgets[0], budgets[1])
        super().set_budget(level, budget + OTHER_BYTES)

    def files(self, level: int) -> list[Path]:
        directory = self.tiers[level][0].directory
        assert directory is not None
        return sorted(directory.rglob("*.kvb"))

    @invariant()
    def budgets_hold(self) -> None:
        for level, (tier, budget) in enumerate(getattr(self, "tiers", [])):
            assert tier.directory is not None
            files = [p for p in tier.directory.rglob("*") if p.is_file()]
            assert sum(p.stat().st_blocks * 512 for p in files) <= budget, level

    @invariant()
    def books_equal_the_tiers(self) -> None:
        if not hasattr(self, "store"):
            return
        for level in self.store._state.levels:
            names = {file.stem for file in self.files(level.index)}
            assert names == {key.hex() for key in level.lru}

    def teardown(self) -> None:
        if hasattr(self, "store"):
            self.store.close()
            self.left.close()


class EncodedStoreMachine(StoreMachine):
    """The local tier in zstd, or at random back to raw after a restart: both are read."""

    def encodings(self) -> TierEncodings | None:
        return TierEncodings(
            {TierKind.LOCAL: Encoding.NONE if self.now % 5 == 4 else Encoding.ZSTD}
        )

    @precondition(lambda self: not self.leases)
    @rule(drain=st.booleans())
    def reboot(self, drain: bool) -> None:
        """What was in RAM is gone; what is left has to be decoded to be read."""
        self.session = None
        if drain:
            self.store.run_pending()
        ram = self.tiers[0][0]
        assert isinstance(ram, MemoryTier)
        ram.blocks.clear()
        self.rebooted = True
        self.open()

    @invariant()
    def ram_is_raw_and_sizes_are_known(self) -> None:
        for index, (tier, _) in enumerate(getattr(self, "tiers", [])):
            assert isinstance(tier, MemoryTier)
            for (_, key), data in tier.blocks.items():
                record = self.store._state.tree.get(key)
                assert record is not None
                assert record.bytes_at(index) == len(data)
                assert index or data == self.put[key] or key in self.damaged
        for level in self.store._state.levels if hasattr(self, "store") else []:
            records = [self.store._state.tree.get(key) for key in level.lru]
            assert level.raw_bytes == sum(r.file_bytes for r in records if r is not None)

    @invariant()
    def no_chain_has_a_hole(self) -> None:
        """Nor may a reboot have made one: the last copies of some blocks were in RAM."""
        if not getattr(self, "rebooted", False):
            super().no_chain_has_a_hole()


class EncodedFsStoreMachine(FsStoreMachine):
    def encodings(self) -> TierEncodings | None:
        return TierEncodings({TierKind.LOCAL: Encoding.ZSTD})


class RulesStoreMachine(StoreMachine):
    """The model has a budget and a time of its own, and is forbidden and allowed again."""

    def __init__(self) -> None:
        super().__init__()
        self.terms = Terms()

    @initialize(blocks=st.integers(1, 5), ttl_seconds=st.sampled_from([0, 900]))
    def begin_with(self, blocks: int, ttl_seconds: int) -> None:
        self.terms = Terms(budget_bytes=blocks * FILE_BYTES, ttl_seconds=ttl_seconds)
        if hasattr(self, "store"):
            self.store.set_terms(lambda _: self.terms)
            self.settle()

    def decide(self) -> Decide:
        return lambda _: self.terms

    @rule(blocks=st.integers(1, 5))
    def change_the_models_budget(self, blocks: int) -> None:
        self.terms = replace(self.terms, budget_bytes=blocks * FILE_BYTES)
        self.store.set_terms(self.decide())
        self.settle()

    @rule()
    def forbid(self) -> None:
        self.terms = replace(self.terms, refusal="a rule", remove=True)
        self.store.set_terms(self.decide())
        self.settle()
        assert not [key for level in self.store._state.levels for key in level.lru]

    @rule()
    def allow(self) -> None:
        self.terms = replace(self.terms, refusal="", remove=False)
        self.store.set_terms(self.decide())

    def settle(self) -> None:
        self.release_all()
        self.now += 20  # past any rest
        self.wall += 20
        self.store.run_pending()

    @invariant()
    def the_models_budget_holds(self) -> None:
        for level in self.store._state.levels if hasattr(self, "store") else []:
            if level.tier.kind is TierKind.LOCAL:
                assert sum(level.held_bytes.values()) <= self.terms.budget_bytes

    @invariant()
    def nothing_forbidden_is_stored_or_found(self) -> None:
        if not hasattr(self, "store") or not self.terms.refusal:
            return
        data = tokens_to_bytes([0])
        assert self.store.match(NS.digest(), [], data, BLOCK_TOKENS) == []
        assert all(not level.lru for level in self.store._state.levels)


TestRulesStoreMachine = RulesStoreMachine.TestCase
TestRulesStoreMachine.settings = settings(
    max_examples=150 * SOAK,
    stateful_step_count=30,
    deadline=None,
    suppress_health_check=[HealthCheck.too_slow],
)
TestStoreMachine = StoreMachine.TestCase
TestStoreMachine.settings = settings(
    max_examples=300 * SOAK,
    stateful_step_count=30,
    deadline=None,
    suppress_health_check=[HealthCheck.too_slow],
)
TestFsStoreMachine = FsStoreMachine.TestCase
TestFsStoreMachine.settings = settings(
    max_examples=50 * SOAK,
    stateful_step_count=20,
    deadline=None,
    suppress_health_check=[HealthCheck.too_slow],
)
TestEncodedStoreMachine = EncodedStoreMachine.TestCase
TestEncodedStoreMachine.settings = TestStoreMachine.settings
TestEncodedFsStoreMachine = EncodedFsStoreMachine.TestCase
TestEncodedFsStoreMachine.settings = TestFsStoreMachine.settings
