"""The store's administration without a sidecar: on the files, their directories locked meanwhile.

Whoever looks or changes single things opens the tiers frozen, so that opening itself changes
nothing. Whoever stores opens them as the sidecar does, only without a thread in the background.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from enum import Enum
from pathlib import Path
from typing import Final

from ollama_tiering.config import SidecarConfig
from ollama_tiering.sidecar.server import open_store
from ollama_tiering.store.admin import Administration
from ollama_tiering.store.frozen import ENDLESS_BYTES, FrozenIndex, FrozenTier
from ollama_tiering.store.index import INDEX_NAME, BlockIndex
from ollama_tiering.store.memory_tier import MemoryTier
from ollama_tiering.store.tier import Tier, TierKind
from ollama_tiering.store.tiered import TieredStore

_DRAIN_SECONDS: Final = 600.0


class Purpose(Enum):
    LOOK = "look"
    CHANGE = "change"  # remove, pin, repair
    STORE = "store"  # what then lies in RAM only is written down at the end


@contextlib.contextmanager
def offline(config: SidecarConfig, purpose: Purpose) -> Iterator[Administration]:
    """ServiceError when a process uses a directory already."""
    if purpose is Purpose.STORE:
        store = open_store(config, background=False)
    else:
        store = _open_frozen(config, thaw=purpose is Purpose.CHANGE)
    try:
        yield Administration(store, alone=True)
    finally:
        store.close(drain_seconds=_DRAIN_SECONDS if purpose is Purpose.STORE else 0)


def _open_frozen(config: SidecarConfig, *, thaw: bool) -> TieredStore:
    """Only directories that are there: nothing is made."""
    wanted = (
        (TierKind.RAM, config.ram_dir, config.ram_budget_bytes),
        (TierKind.LOCAL, config.local_dir, config.local_budget_bytes),
    )
    tiers: list[tuple[Tier, int]] = []
    budgets: list[int] = []
    lowest: Path | None = None
    try:
        for kind, directory, budget_bytes in wanted:
            if budget_bytes and directory.is_dir():
                tiers.append((FrozenTier(kind, directory), ENDLESS_BYTES))
                budgets.append(budget_bytes)
                lowest = directory
        if not tiers:
            tiers.append((MemoryTier(TierKind.LOCAL), ENDLESS_BYTES))  # nothing was stored yet
        store = TieredStore(
            tiers,
            index_path=lowest and lowest / INDEX_NAME,
            index_type=BlockIndex if thaw else FrozenIndex,
            pin_share=config.pin_share,
            background=False,
            measure=False,
        )
    except BaseException:
        for tier, _ in tiers:
            tier.close()
        raise
    for level, budget_bytes in zip(store.state.levels, budgets, strict=False):
        level.lru.budget_bytes = budget_bytes  # only now: opening must not evict down to it
        if thaw and isinstance(level.tier, FrozenTier):
            level.tier.thaw()
    store.pins.enforce()
    return store
