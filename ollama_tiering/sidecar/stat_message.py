"""The message that answers Stat, from what the store reports. Pure."""

from __future__ import annotations

import os
from collections.abc import Sequence

from ollama_tiering import __version__
from ollama_tiering.protocol.pb import administration_pb2 as adm
from ollama_tiering.protocol.plain_text import printable
from ollama_tiering.sidecar.engine.adoption_record import Adoption
from ollama_tiering.sidecar.rechecks import RecheckSum
from ollama_tiering.store import ModelReport, StoreReport, TierReport
from ollama_tiering.store import block_store_pb2 as pb


def stat_message(
    report: StoreReport,
    started_unix_seconds: int,
    runners: Sequence[pb.RunnerReport],
    namespaces: Sequence[adm.NamespaceUse],
    models: Sequence[adm.ModelUse],
    partings: adm.PartingsSum,
    wear: adm.DiskWear,
    builds: Sequence[adm.BuildPair] = (),
    rechecks: Sequence[adm.Rechecked] = (),
) -> adm.StatResponse:
    counters = report.counters
    return adm.StatResponse(
        version=__version__,
        started_unix_seconds=started_unix_seconds,
        tiers=[_tier_stat(tier, report.decode_bytes_per_second) for tier in report.tiers],
        has_calls=counters.has_calls,
        matched_tokens=counters.matched_tokens,
        asked_tokens=counters.asked_tokens,
        put_blocks=counters.put_blocks,
        put_bytes=counters.put_bytes,
        get_blocks=counters.get_blocks,
        get_bytes=counters.get_bytes,
        misses=counters.misses,
        open_leases=report.open_leases,
        queued_demotions=report.unsaved_blocks,
        runners=runners,
        queued_bytes=report.unsaved_bytes,
        not_written=report.not_written,
        q8_0_namespaces=report.q8_0_namespaces,
        namespaces=namespaces,
        model_uses=models,
        model_terms=map(_model_terms, report.models),
        by_rows=True,
        look_up=True,
        put_text=True,
        partings=partings,
        wear=wear,
        builds=builds,
        rechecked=rechecks,
    )


def rechecked(model: str, name: str, of_model: RecheckSum) -> adm.Rechecked:
    return adm.Rechecked(
        model=printable(model),
        name=printable(name),
        blocks=of_model.blocks,
        different=of_model.different,
        last_unix_seconds=of_model.last_unix_seconds,
    )


def build_pair(decided: Adoption, name: str) -> adm.BuildPair:
    return adm.BuildPair(
        model=decided.model,
        engine=printable(decided.engine),
        other_engine=printable(decided.other_engine),
        blocks=decided.blocks,
        deepest_tokens=decided.deepest_tokens,
        unix_seconds=decided.unix_seconds,
        verdict=decided.verdict,
        name=printable(name),
    )


def _model_terms(model: ModelReport) -> adm.ModelTerms:
    return adm.ModelTerms(
        model=model.model,
        name=printable(model.terms.name),
        namespaces=model.namespaces,
        refusal=printable(model.terms.refusal),
        ttl_seconds=model.terms.ttl_seconds,
        budget_bytes=model.terms.budget_bytes,
        local_bytes=model.local_bytes,
        remote_bytes=model.remote_bytes,
    )


def _tier_stat(tier: TierReport, decode_bytes_per_second: float) -> adm.TierStat:
    return adm.TierStat(
        tier=tier.kind.value,  # type: ignore[arg-type]
        directory=os.fsencode(tier.directory or ""),
        budget_bytes=tier.budget_bytes,
        used_bytes=tier.used_bytes,
        reserved_bytes=tier.reserved_bytes,
        blocks=tier.blocks,
        evicted_blocks=tier.stats.evicted_blocks,
        demoted_blocks=tier.stats.demoted_blocks,
        quarantined_blocks=tier.stats.quarantined_blocks,
        read_bytes_per_second=tier.read_bytes_per_second,
        write_bytes_per_second=tier.write_bytes_per_second,
        written_today_bytes=tier.written_today_bytes,
        daily_write_bytes=tier.daily_write_bytes,
        disk_full=tier.disk_full,
        surveyed=tier.surveyed,
        expired_blocks=tier.stats.expired_blocks,
        state=tier.state,
        resting_seconds=tier.resting_seconds,
        sidecars=1 + (tier.shared.neighbours if tier.shared else 0),
        failures=tier.stats.failures,
        encoding=tier.encoding,
        encoding_ratio=tier.raw_bytes / tier.stored_bytes if tier.stored_bytes else 0.0,
        decode_bytes_per_second=decode_bytes_per_second,
    )
