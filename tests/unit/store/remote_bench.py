"""A store with a remote tier that is a directory, and that fails on demand."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from measure.store import samples
from ollama_tiering.store.block.key import BlockKey
from ollama_tiering.store.tiers.contract import Tier, TierKind
from ollama_tiering.store.tiers.memory import MemoryTier
from tests.contract.faulty import Faults, remote_tier
from tests.unit.store.support import FILE_BYTES, Bench, keys_of


class RemoteBench(Bench):
    """Budgets in blocks. The remote tier is a directory; the wall clock is the bench's."""

    def __init__(
        self,
        directory: Path,
        ram: int | None = 8,
        local: int | None = 8,
        remote: int = 32,
        **options: Any,
    ) -> None:
        self.faults = Faults()
        tiers: list[tuple[Tier, int]] = []
        if ram is not None:
            tiers.append((MemoryTier(TierKind.RAM), ram * FILE_BYTES))
        if local is not None:
            tiers.append((MemoryTier(TierKind.LOCAL), local * FILE_BYTES))
        tiers.append((remote_tier(directory, self.faults), remote * FILE_BYTES))
        super().__init__(tiers=tiers, **options)
        self.remote = len(tiers) - 1

    def look(self) -> None:
        """One scan of the remote tier, whatever else is to be done."""
        mover = self.store._remote
        assert mover is not None
        while mover.recover() and mover.tidy():
            pass
        mover._rescan.run()

    def forget_above(self) -> None:
        """As if everything but the remote tier had been lost."""
        for level in self.state.levels[:-1]:
            for key in list(level.lru):
                self.state.forget_copy(level, key)
            assert isinstance(level.tier, MemoryTier)
            level.tier.blocks.clear()


def files(directory: Path) -> set[BlockKey]:
    return {BlockKey(bytes.fromhex(path.stem)) for path in directory.rglob("*.kvb")}


def demoted(bench: RemoteBench, tokens: range) -> list[samples.SampleBlock]:
    """Stores a sequence that then lies in the remote tier only."""
    blocks = bench.put(tokens)
    bench.look()
    level = bench.state.levels[-1]
    mover = bench.store._remote
    assert mover is not None
    for block in blocks:
        record = bench.state.tree.get(block.key)
        assert record is not None
        assert mover.copy(record, bench.state.levels[0], level)
    bench.forget_above()
    assert bench.in_tier(bench.remote) >= keys_of(blocks)
    return blocks
