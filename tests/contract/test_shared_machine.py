"""Two sidecars with three tiers each on one remote directory, against a dict, in any weather.

Invariants after every step: the remote directory never holds more than its budget, whoever wrote
it, whatever fails, hangs, crashes, sleeps or has another time of day; what is given out is byte for
byte what was put; what is leased stays readable. At the end, once the weather is fine again, both
see exactly what lies in the directory.
"""

from __future__ import annotations

import contextlib
import errno
import os
import time
from pathlib import Path

from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from measure.store import samples
from ollama_tiering.store.block.encoding import Encoding
from ollama_tiering.store.block.key import BlockKey, prefix_chain, tokens_to_bytes
from ollama_tiering.store.books.encodings import TierEncodings
from ollama_tiering.store.serving.session import Outcome
from ollama_tiering.store.tiered import TieredStore
from ollama_tiering.store.tiers.contract import Tier, TierKind
from ollama_tiering.store.tiers.memory import MemoryTier
from ollama_tiering.store.tiers.remote import RemoteTier
from tests.contract.faulty import WEATHER, Faults, remote_tier
from tests.contract.test_store_machine import (
    BLOCK_TOKENS,
    FILE_BYTES,
    LEASE_SECONDS,
    NS,
    TOKENS,
    tokens_of,
)
from tests.places import short_directory

DEADLINE = 0.05
WHICH = st.integers(0, 1)
ENCODINGS = st.lists(st.sampled_from(Encoding), min_size=2, max_size=2)  # of local and remote
OPERATIONS = ("scan", "create", "write_at", "publish", "open", "read_at", "remove", "announce")


class Sidecar:
    """One store; its memory tiers outlive it, as tmpfs and a disk do."""

    def __init__(
        self, directory: Path, ram: int, local: int, remote: int, encodings: list[Encoding]
    ) -> None:
        self.directory = directory
        self.encodings = dict(zip((TierKind.LOCAL, TierKind.REMOTE), encodings, strict=True))
        self.faults = Faults()
        self.now = 1000.0
        self.wall = 1_000_000.0
        self.remote_bytes = remote * FILE_BYTES
        self.above: list[tuple[Tier, int]] = [(MemoryTier(TierKind.RAM), ram * FILE_BYTES)]
        if local:
            self.above.append((MemoryTier(TierKind.LOCAL), local * FILE_BYTES))
        self.open()

    def open(self) -> None:
        self.remote: RemoteTier = remote_tier(
            self.directory, self.faults, deadline_seconds=DEADLINE, max_threads=3
        )
        self.store = TieredStore(
            [*self.above, (self.remote, self.remote_bytes)],
            background=False,
            measure=False,
            encodings=TierEncodings(self.encodings),
            clock=lambda: self.now,
            wall_clock=lambda: self.wall,
            lease_seconds=LEASE_SECONDS,
            staging_seconds=20 * DEADLINE,
        )
        self.session = self.store.open_session(NS.digest(), NS.fields(), BLOCK_TOKENS)
        self.leases: dict[int, tuple[float, list[BlockKey]]] = {}

    def crash(self) -> None:
        """Nothing is closed but the threads; the others have taken it for dead when it is back."""
        self.faults.heal()
        self.store._leaser.close()
        self.remote._threads.close()
        self.remote._inner = None
        self.open()

    def pass_time(self, seconds: float) -> None:
        self.now += seconds
        self.wall += seconds
        self.leases = {i: held for i, held in self.leases.items() if held[0] > self.now}

    def heal(self) -> None:
        self.faults.heal()
        end = time.monotonic() + 5
        while self.remote.stalled:
            assert time.monotonic() < end
            time.sleep(0.001)


class SharedMachine(RuleBasedStateMachine):
    def __init__(self) -> None:
        super().__init__()
        self.put: dict[BlockKey, bytes] = {}
        self.damaged: set[BlockKey] = set()
        self.sidecars: list[Sidecar] = []
        self.left = contextlib.ExitStack()
        self.directory = self.left.enter_context(short_directory(in_memory=True)) / "remote"

    @initialize(
        ram=st.integers(2, 6),
        local=st.integers(0, 6),
        remote=st.integers(1, 12),
        encodings=st.tuples(ENCODINGS, ENCODINGS),
    )
    def start(
        self, ram: int, local: int, remote: int, encodings: tuple[list[Encoding], list[Encoding]]
    ) -> None:
        self.budget = remote * FILE_BYTES
        self.sidecars = [Sidecar(self.directory, ram, local, remote, own) for own in encodings]

    @rule(which=WHICH, tokens=TOKENS)
    def put_sequence(self, which: int, tokens: list[int]) -> None:
        session = self.sidecars[which].session
        blocks = samples.sequence(NS, tokens)
        answers = session.reserve([block.offer for block in blocks])
        for block, answer in zip(blocks, answers, strict=True):
            if answer.outcome is Outcome.RESERVED:
                session._pending[answer.reservation_id].temp.write_at(0, block.data)
                (result,) = session.commit([answer.reservation_id])
                assert result.stored, result
                self.put[block.key] = block.data

    @rule(which=WHICH, tokens=TOKENS)
    def look_up(self, which: int, tokens: list[int]) -> None:
        sidecar = self.sidecars[which]
        data = tokens_to_bytes(tokens)
        chain = prefix_chain(NS.digest(), data, BLOCK_TOKENS)
        found = sidecar.store.match(NS.digest(), chain, data, BLOCK_TOKENS)
        at = 0
        for block in found:
            stored = tokens_of(self.put[block.key])
            assert stored[: block.rows] == tokens[at : at + block.rows]
            at += block.rows
        leased = sidecar.store.lease(NS.digest(), [block.key for block in found])
        for held in leased.blocks:
            assert held.tier is not TierKind.REMOTE
            # Also of a block that was damaged in the directory: staging checks every byte.
            assert sidecar.store.read_part(held, 0, held.file_bytes) == self.put[held.key]
        keys = [held.key for held in leased.blocks]
        sidecar.leases[leased.lease_id] = (sidecar.now + LEASE_SECONDS, keys)

    @rule(which=WHICH)
    def release_all(self, which: int) -> None:
        for lease_id in self.sidecars[which].leases:
            self.sidecars[which].store.release(lease_id)
        self.sidecars[which].leases = {}

    @rule(which=WHICH, seconds=st.sampled_from([1, 10, 130]))
    def work(self, which: int, seconds: int) -> None:
        """Demotes, drops, looks: twice as often as the rest."""
        self.sidecars[which].pass_time(seconds)
        self.sidecars[which].store.run_pending()

    @rule()
    def both_work(self) -> None:
        for sidecar in self.sidecars:
            sidecar.pass_time(130)
        for sidecar in self.sidecars:
            sidecar.store.run_pending()

    @rule(which=WHICH)
    def look_in_the_middle_of_the_others_claim(self, which: int) -> None:
        one, other = self.sidecars[which], self.sidecars[1 - which]
        one.pass_time(130)
        announce = one.remote.announce

        def raced(generation: int, claim_bytes: int) -> float:
            other.pass_time(130)
            other.store.run_pending()
            return announce(generation, claim_bytes)

        one.remote.announce = raced  # type: ignore[method-assign]
        one.store.run_pending()
        one.remote.announce = announce  # type: ignore[method-assign]

    @rule(which=WHICH, tokens=TOKENS)
    def remove(self, which: int, tokens: list[int]) -> None:
        keys = [block.key for block in samples.sequence(NS, tokens)]
        self.sidecars[which].store.remove_seq(NS.digest(), keys)

    @rule(which=WHICH, error=st.sampled_from(WEATHER), operation=st.sampled_from(OPERATIONS))
    def fail(self, which: int, error: int, operation: str) -> None:
        self.sidecars[which].faults.fail(error, operation)

    @rule(which=WHICH)
    def fail_altogether(self, which: int) -> None:
        self.sidecars[which].faults.fail(errno.ESTALE)

    @rule(which=WHICH, operation=st.sampled_from(OPERATIONS))
    def hang(self, which: int, operation: str) -> None:
        self.sidecars[which].faults.hang(operation)

    @rule(which=WHICH)
    def heal(self, which: int) -> None:
        self.sidecars[which].heal()

    @rule(which=WHICH, seconds=st.integers(-100_000, 100_000))
    def jump_of_the_clock(self, which: int, seconds: int) -> None:
        self.sidecars[which].wall += seconds

    @rule(which=WHICH)
    def crash_and_restart(self, which: int) -> None:
        self.sidecars[which].crash()

    @rule(which=WHICH)
    def stop_and_start(self, which: int) -> None:
        sidecar = self.sidecars[which]
        sidecar.heal()
        sidecar.store.close(drain_seconds=10)
        sidecar.open()

    @rule(pick=st.integers(0, 1000))
    def flip_a_bit(self, pick: int) -> None:
        if files := sorted(self.directory.rglob("*.kvb")):
            file = files[pick % len(files)]
            content = bytearray(file.read_bytes())
            content[4096] ^= 4
            stat = file.stat()
            file.chmod(0o600)
            file.write_bytes(content)
            os.utime(file, ns=(stat.st_atime_ns, stat.st_mtime_ns))

    @invariant()
    def the_shared_budget_holds(self) -> None:
        if self.directory.is_dir():
            suffixes = (".kvb", ".bad")
            files = [p for p in self.directory.rglob("*") if p.suffix in suffixes]
            files += [p for p in self.directory.rglob("*.tmp") if len(p.name) > 64]
            used = sum(path.stat().st_blocks * 512 for path in files)
            assert used <= self.budget, f"{used / FILE_BYTES} of {self.budget / FILE_BYTES} blocks"

    @invariant()
    def own_budgets_hold(self) -> None:
        for sidecar in self.sidecars:
            for tier, budget in sidecar.above:
                assert isinstance(tier, MemoryTier)
                assert sum(map(len, tier.blocks.values())) <= budget

    @invariant()
    def ram_is_raw(self) -> None:
        for sidecar in self.sidecars:
            tier = sidecar.above[0][0]
            assert isinstance(tier, MemoryTier)
            for (_, key), data in tier.blocks.items():
                assert data == self.put[key]

    @invariant()
    def leased_blocks_can_be_read(self) -> None:
        for sidecar in self.sidecars:
            for _, keys in sidecar.leases.values():
                for key in keys:
                    place = (NS.digest(), key)
                    tiers = [tier for tier, _ in sidecar.above]
                    assert any(isinstance(t, MemoryTier) and place in t.blocks for t in tiers)

    def teardown(self) -> None:
        try:
            for sidecar in self.sidecars:
                sidecar.heal()
                sidecar.remote._threads.deadline_seconds = 10.0  # nothing hangs any more
            for _ in range(4):
                for sidecar in self.sidecars:
                    sidecar.pass_time(130)
                    sidecar.store.run_pending()
            for sidecar in self.sidecars:
                mover = sidecar.store._remote
                assert mover is not None
                mover._rescan.run()
                report = sidecar.store.report().tiers[-1]
                assert report.state == "ok"
                level = sidecar.store._state.levels[-1]
                assert level.shared is not None
                there = {path.stem for path in self.directory.rglob("*.kvb")}
                doomed = {key.hex() for _, key in level.shared.doomed}
                assert {key.hex() for key in level.lru} == there - doomed
                sizes = {p.stem: p.stat().st_size for p in self.directory.rglob("*.kvb")}
                records = [sidecar.store._state.tree.get(key) for key in level.lru]
                known = {r.key.hex(): r.bytes_at(level.index) for r in records if r is not None}
                assert known == {name: sizes[name] for name in there - doomed}
                assert level.raw_bytes == sum(r.file_bytes for r in records if r is not None)
        finally:
            for sidecar in self.sidecars:
                sidecar.faults.heal()
                sidecar.store.close(drain_seconds=0)
            self.left.close()


TestSharedMachine = SharedMachine.TestCase
TestSharedMachine.settings = settings(
    max_examples=int(os.environ.get("TIERING_EXAMPLES", "40")),
    stateful_step_count=25,
    deadline=None,
    suppress_health_check=[HealthCheck.too_slow],
)
