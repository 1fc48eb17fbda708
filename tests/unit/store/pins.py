"""Stores on real directories that pins are tried in."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from measure.store import samples
from ollama_tiering.store.tiers.contract import TierKind
from ollama_tiering.store.tiers.directory import FsTier
from ollama_tiering.store.tiers.names import INDEX_NAME
from tests.unit.store.support import FILE_BYTES, NS, Bench


def on_disk(root: Path, *, blocks: int = 80, index: bool = False, **options: Any) -> Bench:
    """Directories count against the budget too, so that not quite so many blocks find room."""
    tier = FsTier(TierKind.LOCAL, root / "local")
    path = root / "local" / INDEX_NAME if index else None
    return Bench(tiers=[(tier, blocks * FILE_BYTES)], index_path=path, **options)


def pressure(bench: Bench, count: int = 30) -> None:
    """Far more single blocks than the budget holds."""
    for number in range(count):
        bench.try_put(samples.sequence(NS, [5000 + number]))
        bench.tick()
        bench.store.run_pending()
