"""The store against a dict, with pins: whatever else happens, what is pinned stays stored.

Without damage, which is the only thing that may take a pinned block, and with more pressure.
"""

from __future__ import annotations

from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import invariant, rule

from measure.store import samples
from ollama_tiering.store.block.key import BlockKey
from ollama_tiering.store.errors import PinsFull
from ollama_tiering.store.serving.session import Outcome
from ollama_tiering.store.tools.admin import Administration
from ollama_tiering.store.values import Selection
from tests.contract.test_store_machine import FILE_BYTES, NS, FsStoreMachine, StoreMachine


class PinRules(StoreMachine):
    """Pins live in memory here: a restart ends them."""

    pins_outlive_a_restart = False
    flip_a_bit = None  # no rule here
    change_the_budget = None  # nor this: it would put pins out of force

    def __init__(self) -> None:
        super().__init__()
        self.pinned: dict[BlockKey, list[BlockKey]] = {}
        self.kept_windows: set[BlockKey] = set()

    def open(self) -> None:
        """After a restart others of the window blocks may be kept, if not all can be."""
        super().open()
        if not self.pins_outlive_a_restart:
            self.pinned = {}
        self.kept_windows = set(self.store.state.pins.kept_windows())

    @rule()
    def settle(self) -> None:
        """What is kept once is kept on."""
        self.store.pins.settle()
        kept = set(self.store.state.pins.kept_windows())
        assert kept >= self.kept_windows
        self.kept_windows = kept

    @rule(pick=st.integers(0, 1000))
    def pin(self, pick: int) -> None:
        tree, pins = self.store.state.tree, self.store.state.pins
        stored = sorted(record.key for record in tree if not record.window)
        if not stored:
            return
        key = stored[pick % len(stored)]
        chain = [record.key for record in tree.ancestors(key)]
        new = {record for record in chain if not pins.keeps(record)}
        new |= {window.key for record in new for window in tree.windows(record)}
        try:
            self.store.pins.pin(key)
        except PinsFull as error:
            if "list of pins" in str(error):
                pins = {pin.key for pin in self.store.state.pins}
                assert key not in pins or key in self.pinned
                return
            pinned_bytes = self.store.pins.pinned_bytes() + len(new) * FILE_BYTES
            assert pinned_bytes > self.store.pins.limit_bytes
        else:
            self.pinned[key] = chain
            assert all(map(pins.keeps, new))
            self.settle()

    @rule(first=st.integers(100, 130))
    def press(self, first: int) -> None:
        """Other sequences than the rest of the rules puts, so that something must go."""
        assert self.session is not None
        blocks = samples.sequence(NS, range(first, first + 16))
        answers = self.session.reserve([block.offer for block in blocks])
        ids = []
        for block, answer in zip(blocks, answers, strict=True):
            if answer.outcome is Outcome.RESERVED:
                self.session._pending[answer.reservation_id].temp.write_at(0, block.data)
                ids.append(answer.reservation_id)
                self.put[block.key] = block.data
        assert all(result.stored for result in self.session.commit(ids))
        self.store.run_pending()

    @rule(pick=st.integers(0, 1000))
    def unpin(self, pick: int) -> None:
        if self.pinned:
            key = sorted(self.pinned)[pick % len(self.pinned)]
            assert self.store.pins.unpin(key)
            del self.pinned[key]
            self.kept_windows = set(self.store.state.pins.kept_windows())

    @rule(older_than=st.sampled_from([0.0, 1.0]), dry_run=st.booleans())
    def remove_what_may_go(self, older_than: float, dry_run: bool) -> None:
        if self.leases:
            return  # it would wait for them
        admin = Administration(self.store, alone=True)
        before = set(record.key for record in self.store.state.tree)
        done = admin.remove(Selection(older_than_seconds=older_than), dry_run=dry_run)
        after = set(record.key for record in self.store.state.tree)
        assert len(before - after) == (0 if dry_run else done.blocks)
        if not dry_run and not older_than and not self.store.state.writing:
            kept = {key for chain in self.pinned.values() for key in chain}
            tree = self.store.state.tree
            assert after <= kept | {one.key for key in kept for one in tree.windows(key)}

    @invariant()
    def pinned_blocks_are_there(self) -> None:
        for chain in self.pinned.values():
            for key in chain:
                assert key in self.store.state.tree
        for key in self.kept_windows:
            assert key in self.store.state.tree

    @invariant()
    def pins_have_their_share_only(self) -> None:
        if hasattr(self, "store"):
            assert self.store.pins.pinned_bytes() <= self.store.pins.limit_bytes


class PinMachine(PinRules):
    pass


class FsPinMachine(FsStoreMachine, PinRules):
    pins_outlive_a_restart = True
    flip_a_bit = None


TestPinMachine = PinMachine.TestCase
TestPinMachine.settings = settings(
    max_examples=60,
    stateful_step_count=30,
    deadline=None,
    suppress_health_check=[HealthCheck.too_slow],
)
TestFsPinMachine = FsPinMachine.TestCase
TestFsPinMachine.settings = settings(
    max_examples=20,
    stateful_step_count=20,
    deadline=None,
    suppress_health_check=[HealthCheck.too_slow],
)
