"""The store's administration without a sidecar: on the files, their directories locked meanwhile.

Whoever only looks opens the tiers frozen and changes no file. Whoever changes something opens the
store as the sidecar would, only without moving blocks in the background.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from pathlib import Path
from typing import Final

from ollama_tiering.config import SidecarConfig
from ollama_tiering.sidecar.server import open_store
from ollama_tiering.store.admin import Administration
from ollama_tiering.store.frozen import ENDLESS_BYTES, FrozenIndex, FrozenTier
from ollama_tiering.store.index import INDEX_NAME
from ollama_tiering.store.memory_tier import MemoryTier
from ollama_tiering.store.tier import Tier, TierKind
from ollama_tiering.store.tiered import TieredStore

_DRAIN_SECONDS: Final = 600.0


@contextlib.contextmanager
def offline(config: SidecarConfig, *, changes: bool) -> Iterator[Administration]:
    """ServiceError when a process uses a directory already."""
    store = _open(config) if changes else _open_frozen(config)
    try:
        yield Administration(store, alone=True)
    finally:
        store.close(drain_seconds=0)


def drain(config: SidecarConfig) -> None:
    """Writes down what lies in RAM only, as a sidecar does before it ends."""
    _open(config).close(_DRAIN_SECONDS)


def _open(config: SidecarConfig) -> TieredStore:
    return open_store(config, background=False)


def _open_frozen(config: SidecarConfig) -> TieredStore:
    wanted = (
        (TierKind.RAM, config.ram_dir, config.ram_budget_bytes),
        (TierKind.LOCAL, config.local_dir, config.local_budget_bytes),
    )
    tiers: list[tuple[Tier, int]] = []
    lowest: Path | None = None
    try:
        for kind, directory, budget_bytes in wanted:
            if budget_bytes and directory.is_dir():
                tiers.append((FrozenTier(kind, directory), ENDLESS_BYTES))
                lowest = directory
        if not tiers:
            tiers.append((MemoryTier(TierKind.LOCAL), ENDLESS_BYTES))  # nothing was stored yet
        store = TieredStore(
            tiers,
            index_path=lowest and lowest / INDEX_NAME,
            index_type=FrozenIndex,
            background=False,
            measure=False,
        )
    except BaseException:
        for tier, _ in tiers:
            tier.close()
        raise
    return store
