"""A first figure of a tier that has none."""

from __future__ import annotations

from pathlib import Path

from ollama_tiering.store.books.speed import SpeedMeter
from ollama_tiering.store.tiers.contract import TierKind
from ollama_tiering.store.tiers.memory import MemoryTier
from ollama_tiering.store.upkeep.probing import measure_directory
from ollama_tiering.system.filesystems import in_memory


def test_a_measurement_leaves_nothing_behind(tmp_path: Path) -> None:
    meter = SpeedMeter(MemoryTier(TierKind.LOCAL))
    measure_directory(tmp_path, meter, in_memory=in_memory(tmp_path))
    assert meter.write > 0
    assert meter.read >= 0
    assert list(tmp_path.iterdir()) == []
