"""The store's report as Prometheus metrics.

Nothing is counted here: every scrape takes one TieredStore.report(), so no number exists twice. The
metrics show counts, sizes, times, and names of models, but no prompt, key or path.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from typing import Final

from prometheus_client import CollectorRegistry, Info, ProcessCollector, make_wsgi_app
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily
from prometheus_client.metrics_core import Metric
from prometheus_client.registry import Collector

from ollama_tiering import __version__
from ollama_tiering.sidecar.endpoint import HttpAnswer, HttpRequest, Page
from ollama_tiering.sidecar.model_book import ModelBook
from ollama_tiering.sidecar.model_metrics import ModelCollector
from ollama_tiering.sidecar.runners import RunnerTable
from ollama_tiering.store import StoreReport, TieredStore, TierReport

# These exist from the start with 0, so that a watcher sees the first one as an increase.
_REASONS: Final = ("unknown prefix", "evicted", "i/o error", "file gone", "corrupt")
_ERRORS: Final = ("EIO", "ENOSPC", "EDQUOT", "EROFS", "EMFILE", "ESTALE", "ENOENT", "ETIMEDOUT")

_Getter = Callable[[TierReport], float]
_TIER_GAUGES: Final[tuple[tuple[str, str, _Getter], ...]] = (
    ("budget_bytes", "Physical bytes the tier may use.", lambda t: t.budget_bytes),
    (
        "used_bytes",
        "Physical bytes the tier uses, quarantined files included.",
        lambda t: t.used_bytes,
    ),
    ("reserved_bytes", "Bytes reserved for writes and deletions.", lambda t: t.reserved_bytes),
    (
        "overhead_bytes",
        "Of the used bytes: files that are no usable blocks, e.g. quarantined ones.",
        lambda t: t.overhead_bytes,
    ),
    ("blocks", "Blocks the tier holds.", lambda t: t.blocks),
    (
        "suspended",
        "1 while the tier rests after an I/O error or could not be opened, else 0.",
        lambda t: float(t.suspended),
    ),
    (
        "read_bytes_per_second",
        "Measured read speed, a moving average; 0 when never measured.",
        lambda t: t.read_bytes_per_second,
    ),
    (
        "write_bytes_per_second",
        "Measured write speed, a moving average; 0 when never measured.",
        lambda t: t.write_bytes_per_second,
    ),
)
_TIER_COUNTERS: Final[tuple[tuple[str, str, _Getter], ...]] = (
    (
        "written_bytes",
        "Physical bytes written to the tier, by clients and by the sidecar.",
        lambda t: t.stats.written_bytes,
    ),
    (
        "evicted_blocks",
        "Blocks evicted that no other tier holds.",
        lambda t: t.stats.evicted_blocks,
    ),
    (
        "demoted_blocks",
        "Blocks evicted that a tier below still holds.",
        lambda t: t.stats.demoted_blocks,
    ),
    ("promoted_blocks", "Blocks copied up into the tier.", lambda t: t.stats.promoted_blocks),
    (
        "quarantined_blocks",
        "Blocks found damaged and put aside.",
        lambda t: t.stats.quarantined_blocks,
    ),
    ("served_blocks", "Blocks leased to clients.", lambda t: t.stats.served_blocks),
    ("served_bytes", "Bytes of the blocks leased to clients.", lambda t: t.stats.served_bytes),
)


class StoreCollector(Collector):
    """Each scrape takes one report of the store."""

    def __init__(self, store: TieredStore) -> None:
        self._store = store

    def collect(self) -> Iterator[Metric]:
        report = self._store.report()
        yield from _store_metrics(report)
        yield from _tier_metrics(report.tiers)
        yield GaugeMetricFamily(
            "tiering_mover_silent_seconds",
            "Since the thread that moves blocks last began a piece of work.",
            self._store.mover_silent_seconds(),
        )


def _store_metrics(report: StoreReport) -> Iterator[Metric]:
    counters = report.counters
    for name, text, count in (
        ("lookups", "Look-ups of a prompt.", counters.has_calls),
        ("lookup_hits", "Look-ups that found at least one row.", counters.hits),
        ("asked_tokens", "Prompt tokens looked up.", counters.asked_tokens),
        ("matched_tokens", "Prompt tokens found in the store.", counters.matched_tokens),
        ("put_blocks", "Blocks committed by clients.", counters.put_blocks),
        ("put_bytes", "Bytes of the blocks committed by clients.", counters.put_bytes),
    ):
        yield CounterMetricFamily(f"tiering_{name}", text, count)
    misses = CounterMetricFamily(
        "tiering_misses",
        "Look-ups, leases and blocks that came to nothing, by reason.",
        labels=("reason",),
    )
    for reason, count in (dict.fromkeys(_REASONS, 0) | counters.misses).items():
        misses.add_metric([label(reason)], count)
    yield misses
    for name, text, value in (
        ("leases", "Open leases.", float(report.open_leases)),
        ("oldest_lease_age_seconds", "Age of the oldest open lease.", report.oldest_lease_seconds),
        ("queue_blocks", "Blocks still to be written down a tier.", float(report.unsaved_blocks)),
    ):
        yield GaugeMetricFamily(f"tiering_{name}", text, value)


def _tier_metrics(tiers: Iterable[TierReport]) -> Iterator[Metric]:
    tiers = list(tiers)
    for name, text, get in _TIER_GAUGES:
        gauge = GaugeMetricFamily(f"tiering_tier_{name}", text, labels=("tier",))
        for tier in tiers:
            gauge.add_metric([tier.kind.label], get(tier))
        yield gauge
    for name, text, get in _TIER_COUNTERS:
        counter = CounterMetricFamily(f"tiering_tier_{name}", text, labels=("tier",))
        for tier in tiers:
            counter.add_metric([tier.kind.label], get(tier))
        yield counter
    moved = CounterMetricFamily(
        "tiering_tier_bytes",
        "Bytes the sidecar read from the tier, bytes written to it.",
        labels=("tier", "direction"),
    )
    waited = CounterMetricFamily(
        "tiering_tier_seconds",
        "Seconds the sidecar waited for its reads from and writes to the tier.",
        labels=("tier", "direction"),
    )
    failures = CounterMetricFamily(
        "tiering_tier_failures", "I/O errors of the tier.", labels=("tier", "error")
    )
    for tier in tiers:
        name, stats = tier.kind.label, tier.stats
        moved.add_metric([name, "read"], stats.read_bytes)
        moved.add_metric([name, "write"], stats.written_bytes)
        waited.add_metric([name, "read"], stats.read_seconds)
        waited.add_metric([name, "write"], stats.write_seconds)
        for error, count in (dict.fromkeys(_ERRORS, 0) | stats.failures).items():
            failures.add_metric([name, error], count)
    yield from (moved, waited, failures)


def label(reason: str) -> str:
    """`i/o error` -> `io_error`."""
    return reason.replace("/", "").replace(" ", "_")


def make_registry(
    store: TieredStore, book: ModelBook | None = None, runners: RunnerTable | None = None
) -> CollectorRegistry:
    registry = CollectorRegistry()
    registry.register(StoreCollector(store))
    if book is not None:
        registry.register(ModelCollector(book, runners))
    ProcessCollector(registry=registry)
    build = Info("tiering_build", "What runs.", registry=registry)
    build.info({"version": __version__})
    return registry


def metrics_page(registry: CollectorRegistry) -> Page:
    """In the format and encoding that the client asks for."""
    app = make_wsgi_app(registry)

    async def answer(request: HttpRequest) -> HttpAnswer:
        said: list[tuple[str, list[tuple[str, str]]]] = []
        environ = {
            "REQUEST_METHOD": "GET",
            "PATH_INFO": request.path,
            "QUERY_STRING": request.query,
            "HTTP_ACCEPT": request.headers.get("accept", ""),
            "HTTP_ACCEPT_ENCODING": request.headers.get("accept-encoding", ""),
        }
        parts: Iterable[bytes] = app(environ, lambda *status: said.append(status))
        status, headers = said[0]
        return HttpAnswer(int(status.split()[0]), b"".join(parts), tuple(headers))

    return answer
