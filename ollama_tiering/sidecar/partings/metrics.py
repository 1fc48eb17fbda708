"""What prompts that parted from the stored ones cost, as Prometheus metrics. Each scrape takes the
sums of the last 24 hours.
"""

from __future__ import annotations

from collections.abc import Iterator

from prometheus_client.core import GaugeMetricFamily
from prometheus_client.metrics_core import Metric
from prometheus_client.registry import Collector

from ollama_tiering.sidecar.partings.partings import Partings


class PartingCollector(Collector):
    def __init__(self, partings: Partings) -> None:
        self._partings = partings

    def collect(self) -> Iterator[Metric]:
        lost = self._partings.lost_in_a_day()
        for name, text, value in (
            ("requests", "Prompts that parted from what is stored, in 24 hours.", lost.requests),
            ("lost_tokens", "Tokens computed again for that, in 24 hours.", lost.tokens),
            ("lost_seconds", "Seconds spent on computing them, in 24 hours.", lost.seconds),
        ):
            yield GaugeMetricFamily(f"tiering_partings_{name}", text, float(value))
