"""The report of a store, out of its books."""

from __future__ import annotations

import copy
from collections.abc import Sequence

from ollama_tiering.store.books import model_budget
from ollama_tiering.store.books.report import (
    REPORTED_NAMESPACES,
    AbsentTier,
    StoreReport,
    TierReport,
)
from ollama_tiering.store.books.state import StoreState
from ollama_tiering.store.tiers.contract import TierStats
from ollama_tiering.store.tiers.daily_writes import DailyWrites


def take_written(state: StoreState) -> dict[str, int]:
    """Bytes written to disks that wear since the last call, by the model's file name, which is
    empty where it is not known. Takes the lock.
    """
    written: dict[str, int] = {}
    with state.lock:
        for level in state.levels:
            for namespace, size in level.unbooked_bytes.items():
                model = state.terms.model(namespace)
                written[model] = written.get(model, 0) + size
            level.unbooked_bytes.clear()
    return written


def report_of(
    state: StoreState, daily: DailyWrites, left_out: Sequence[AbsentTier] = ()
) -> StoreReport:
    """Takes the store's lock."""
    with state.lock:
        state.expire()
        tiers = [
            TierReport(
                kind=level.tier.kind,
                directory=level.tier.directory,
                budget_bytes=level.lru.budget_bytes,
                used_bytes=level.physical_bytes,
                reserved_bytes=level.lru.reserved_bytes,
                blocks=len(level.lru),
                stats=copy.deepcopy(level.stats),
                read_bytes_per_second=level.speed.read,
                write_bytes_per_second=level.speed.write,
                suspended=state.suspended(level),
                overhead_bytes=level.lru.overhead_bytes,
                written_today_bytes=level.tier.wears_disk * daily.written_bytes,
                daily_write_bytes=level.tier.wears_disk * daily.limit_bytes,
                disk_full=level.space is not None and level.space.short,
                surveyed=level.surveyed,
                encoding=state.encodings.of(level).value,
                raw_bytes=level.raw_bytes,
                stored_bytes=level.lru.used_bytes,
                resting_seconds=max(0.0, level.suspended_until - state.clock()),
                shared=level.shared,
            )
            for level in state.levels
        ]
        counters = copy.deepcopy(state.counters)
        if refused := sum(level.tier.refused_files for level in state.levels):
            counters.misses["not ours"] = refused
        tiers += map(_absent, left_out)
        return StoreReport(
            sorted(tiers, key=lambda tier: tier.kind),
            counters,
            len(state.leases),
            len(state.unsaved),
            unsaved_bytes=state.unsaved.waiting_bytes,
            not_written=dict(state.admission.refused),
            decode_bytes_per_second=state.encodings.decoding.bytes_per_second,
            q8_0_namespaces=state.encodings.rounded_namespaces(),
            namespaces=state.tree.counts(REPORTED_NAMESPACES),
            oldest_lease_seconds=state.leases.oldest_seconds(),
            models=model_budget.models(state),
        )


def _absent(tier: AbsentTier) -> TierReport:
    return TierReport(
        kind=tier.kind,
        directory=tier.directory,
        budget_bytes=tier.budget_bytes,
        used_bytes=0,
        reserved_bytes=0,
        blocks=0,
        stats=TierStats(),
        read_bytes_per_second=0.0,
        write_bytes_per_second=0.0,
        suspended=True,
        written_today_bytes=0,
        daily_write_bytes=0,
        disk_full=False,
        surveyed=True,
        encoding="none",
        raw_bytes=0,
        stored_bytes=0,
        absent=str(tier),
    )
