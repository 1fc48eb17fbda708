"""A store over memory tiers that a test drives by hand: no threads, its own clock."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from measure.store import samples
from ollama_tiering.store.block.key import BlockExtra, BlockKey, prefix_chain, tokens_to_bytes
from ollama_tiering.store.books.report import MatchedBlock
from ollama_tiering.store.serving.session import CommitResult, Outcome, Reserved
from ollama_tiering.store.tiered import TieredStore
from ollama_tiering.store.tiers.contract import Tier, TierKind
from ollama_tiering.store.tiers.memory import MemoryTier

NS = samples.namespace(layers=1)
NAMESPACE = NS.digest()
BLOCK_TOKENS = int(NS.block_tokens)
FILE_BYTES = len(samples.sequence(NS, [0])[0].data)

DIRECTORY_BYTES = 4096


def disk_budget(blocks: int) -> int:
    """Room for so many blocks in a directory: what lies beside them counts as well."""
    return blocks * (FILE_BYTES + DIRECTORY_BYTES) + 8 * DIRECTORY_BYTES


def path_of(tier: Tier, key: BlockKey) -> Path:
    """Where a block lies in a tier that names its files."""
    path = tier.path(NAMESPACE, key)
    assert path is not None
    return Path(path)


class Bench:
    """Budgets are counted in blocks; None leaves the tier out."""

    def __init__(
        self,
        ram: int | None = 8,
        local: int | None = 16,
        *,
        tiers: list[tuple[Tier, int]] | None = None,
        index_path: Path | None = None,
        **options: Any,
    ) -> None:
        self.now = 1000.0
        if tiers is None:
            tiers = []
            if ram is not None:
                tiers.append((MemoryTier(TierKind.RAM), ram * FILE_BYTES))
            if local is not None:
                tiers.append((MemoryTier(TierKind.LOCAL), local * FILE_BYTES))
        self.tiers = tiers
        self.options = {"lease_seconds": 60.0, "reserve_seconds": 120.0, **options}
        self.index_path = index_path
        self.open()

    def open(self) -> None:
        self.store = TieredStore(
            self.tiers,
            index_path=self.index_path,
            background=False,
            measure=False,
            clock=lambda: self.now,
            wall_clock=lambda: self.now,
            **self.options,
        )
        self.session = self.store.open_session(NAMESPACE, NS.fields(), BLOCK_TOKENS)
        self.state = self.store._state

    def tick(self, seconds: float = 1.0) -> None:
        self.now += seconds

    def reserve(self, blocks: Sequence[samples.SampleBlock]) -> list[Reserved]:
        return self.session.reserve([block.offer for block in blocks])

    def fill(self, reserved: Reserved, data: bytes) -> None:
        self.session._pending[reserved.reservation_id].temp.write_at(0, data)

    def put(
        self, tokens: Sequence[int], extras: Sequence[BlockExtra] = ()
    ) -> list[samples.SampleBlock]:
        """Stores the whole sequence; every block must find room."""
        blocks = samples.sequence(NS, tokens, extras)
        results = self.try_put(blocks)
        assert all(result.stored for result in results), results
        self.tick()
        return blocks

    def try_put(self, blocks: Sequence[samples.SampleBlock]) -> list[CommitResult]:
        """One result per block that was reserved or had no room."""
        results = []
        for block, reserved in zip(blocks, self.reserve(blocks), strict=True):
            if reserved.outcome is Outcome.RESERVED:
                self.fill(reserved, block.data)
                results += self.session.commit([reserved.reservation_id])
            elif reserved.outcome is Outcome.NO_ROOM:
                results.append(CommitResult(False, "no room"))
        return results

    def match(self, tokens: Sequence[int], extras: Sequence[BlockExtra] = ()) -> list[MatchedBlock]:
        data = tokens_to_bytes(tokens)
        keys = prefix_chain(NAMESPACE, data, BLOCK_TOKENS, extras)
        self.tick()
        return self.store.match(NAMESPACE, keys, data, BLOCK_TOKENS)

    def rows(self, tokens: Sequence[int]) -> int:
        return sum(block.rows for block in self.match(tokens))

    def lease(self, blocks: Sequence[samples.SampleBlock]) -> int:
        leased = self.store.lease(NAMESPACE, [block.key for block in blocks])
        assert len(leased.blocks) == len(blocks)
        return leased.lease_id

    def in_tier(self, index: int) -> set[BlockKey]:
        return set(self.state.levels[index].lru)

    def damage(self, index: int, key: BlockKey, offset: int = 4096) -> None:
        tier = self.tiers[index][0]
        assert isinstance(tier, MemoryTier)
        content = bytearray(tier.blocks[NAMESPACE, key])
        content[offset] ^= 1
        tier.blocks[NAMESPACE, key] = bytes(content)


def keys_of(blocks: Sequence[samples.SampleBlock]) -> set[BlockKey]:
    return {block.key for block in blocks}
