"""Names that a start finds are made durable after it, and do not hold it up."""

from __future__ import annotations

from pathlib import Path

import pytest

from ollama_tiering.store.tiers.contract import TierKind
from ollama_tiering.store.tiers.directory import FsTier
from ollama_tiering.store.tiers.unsynced import Place, UnsyncedNames
from tests.unit.store.support import Bench, disk_budget


def test_names_that_a_start_found_are_made_durable_after_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whoever gave them may have been killed. The tier may be written to before that is done."""
    bench = Bench(tiers=[(FsTier(TierKind.LOCAL, tmp_path / "tier"), disk_budget(20))])
    bench.put(range(10))
    bench.store.close()
    synced: list[Place] = []
    failing = True

    def sync(self: UnsyncedNames, place: Place) -> None:
        if failing:
            raise OSError(5, "I/O error")
        synced.append(place)
        self._new.pop(place, None)

    monkeypatch.setattr(UnsyncedNames, "_sync", sync)
    bench.tiers = [(FsTier(TierKind.LOCAL, tmp_path / "tier"), disk_budget(20))]
    bench.open()
    assert bench.state.levels[0].surveyed
    bench.store.run_pending()
    assert bench.state.suspended(bench.state.levels[0])
    failing = False
    bench.tick(120)
    bench.store.run_pending()
    found = {path.relative_to(tmp_path / "tier").parts[:-1] for path in tmp_path.rglob("*.kvb")}
    assert found <= set(synced)
    synced.clear()
    bench.store.run_pending()
    assert not synced


def test_names_are_not_looked_for_before_a_tier_is_surveyed() -> None:
    bench = Bench()
    level = bench.state.levels[1]
    synced: list[float] = []
    bench.tiers[1][0].sync_names = lambda: synced.append(bench.now)  # type: ignore[method-assign]
    level.surveyed = False
    bench.store.run_pending()
    assert not synced
    level.surveyed = True
    bench.store.run_pending()
    assert len(synced) == 1
