"""The store's report as Prometheus metrics, and where a Prometheus server on this host reads them.

Nothing is counted here: every scrape takes one TieredStore.report(), so no number exists twice. The
endpoint is off unless `sidecar.metrics_port` is set, listens on loopback only and answers one
connection at a time in a thread of its own: whoever holds it up holds up the metrics and nothing
else. What it shows is counts, sizes and times; no prompt, key, path or model name.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Iterable, Iterator
from socketserver import TCPServer
from types import TracebackType
from typing import Any, Final
from wsgiref.simple_server import WSGIRequestHandler, WSGIServer, make_server

from prometheus_client import CollectorRegistry, Info, ProcessCollector, make_wsgi_app
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily
from prometheus_client.metrics_core import Metric
from prometheus_client.registry import Collector

from ollama_tiering import __version__
from ollama_tiering.store.report import StoreReport, TierReport
from ollama_tiering.store.tiered import TieredStore

log = logging.getLogger(__name__)

LOOPBACK: Final = "127.0.0.1"
# There from the start with 0, so that the first one is an increase to whoever watches.
_REASONS: Final = ("unknown prefix", "evicted", "i/o error", "file gone", "corrupt")
_ERRORS: Final = ("EIO", "ENOSPC", "EDQUOT", "EROFS", "EMFILE", "ESTALE", "ENOENT", "ETIMEDOUT")
_CLIENT_SECONDS: Final = 5.0
_STOP_SECONDS: Final = 1.0

_Getter = Callable[[TierReport], float]
_TIER_GAUGES: Final[tuple[tuple[str, str, _Getter], ...]] = (
    ("budget_bytes", "Physical bytes the tier may use.", lambda t: t.budget_bytes),
    (
        "used_bytes",
        "Physical bytes the tier uses, quarantined files included.",
        lambda t: t.used_bytes,
    ),
    ("reserved_bytes", "Bytes claimed by writers and deletions.", lambda t: t.reserved_bytes),
    (
        "overhead_bytes",
        "Of the used bytes: files that are no usable blocks, e.g. quarantined ones.",
        lambda t: t.overhead_bytes,
    ),
    ("blocks", "Blocks the tier holds.", lambda t: t.blocks),
    (
        "suspended",
        "1 while the tier rests after an I/O error, else 0.",
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
    """One report of the store per scrape."""

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


def make_registry(store: TieredStore) -> CollectorRegistry:
    registry = CollectorRegistry()
    registry.register(StoreCollector(store))
    ProcessCollector(registry=registry)
    build = Info("tiering_build", "What runs.", registry=registry)
    build.info({"version": __version__})
    return registry


class MetricsEndpoint:
    """A context manager. Without a port it does nothing; a port that is taken is a warning: the
    sidecar is there for its blocks.
    """

    def __init__(self, registry: CollectorRegistry, port: int) -> None:
        self._registry = registry
        self._port = port
        self._server: WSGIServer | None = None

    def __enter__(self) -> MetricsEndpoint:
        if not self._port:
            return self
        app = make_wsgi_app(self._registry)
        try:
            self._server = make_server(LOOPBACK, self._port, app, _Server, _Handler)
        except OSError as error:
            log.warning("metrics not served: port=%d error=%s", self._port, error)
            return self
        serve = self._server.serve_forever
        threading.Thread(target=serve, args=(0.1,), name="metrics", daemon=True).start()
        log.info("metrics: url=http://%s:%d/metrics", LOOPBACK, self._server.server_port)
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        server, self._server = self._server, None
        if server is not None:
            # Not waited for: a slow client must not hold up the sidecar's end.
            ending = threading.Thread(target=server.shutdown, daemon=True)
            ending.start()
            ending.join(_STOP_SECONDS)
            server.server_close()


class _Server(WSGIServer):
    def server_bind(self) -> None:
        """As the base class, but asks no name server, perhaps in vain, what we are called."""
        TCPServer.server_bind(self)
        self.server_name, self.server_port = LOOPBACK, self.server_address[1]
        self.setup_environ()


class _Handler(WSGIRequestHandler):
    timeout = _CLIENT_SECONDS  # of one read or write

    def log_message(self, format: str, *args: Any) -> None:
        log.debug("metrics request: client=%s %s", self.client_address[0], format % args)
