"""Measures tiers that were never measured, within their budgets. Called before the mover starts."""

from __future__ import annotations

import logging

from ollama_tiering.store.speed import PROBE_BYTES, measure_directory
from ollama_tiering.store.state import StoreState

log = logging.getLogger(__name__)


def measure_levels(state: StoreState) -> None:
    """Nothing is evicted for it: where there is no room now, the first transfers will tell."""
    for level in state.levels:
        directory = level.tier.directory
        if directory is None or level.speed.read or not level.surveyed or level.shared:
            continue
        need_bytes = PROBE_BYTES + level.tier.growth_bytes
        if level.space is not None and (level.space.headroom_bytes(fresh=True) or 0) < need_bytes:
            continue
        with state.lock:
            claim = level.lru.reserve(need_bytes)
        if claim is None:
            continue
        try:
            measure_directory(directory, level.speed, in_memory=level.tier.in_memory)
        except OSError as error:
            log.warning("not measured: tier=%s error=%s", level.tier.kind.label, error)
        finally:
            with state.lock:
                claim.release()
