"""Blocks that were computed again and compared, as Prometheus metrics."""

from __future__ import annotations

from collections.abc import Callable, Iterator

from prometheus_client.core import CounterMetricFamily
from prometheus_client.metrics_core import Metric
from prometheus_client.registry import Collector

from ollama_tiering.sidecar.rechecks import Rechecks


class RecheckCollector(Collector):
    """`name`: of a model, by its file name, as people know it."""

    def __init__(self, rechecks: Rechecks, name: Callable[[str], str]) -> None:
        self._rechecks = rechecks
        self._name = name

    def collect(self) -> Iterator[Metric]:
        checked = CounterMetricFamily(
            "tiering_rechecked_blocks",
            "Stored blocks that were computed again, with the same bits.",
            labels=["model"],
        )
        different = CounterMetricFamily(
            "tiering_different_blocks",
            "Stored blocks that were computed again with other bits, and put aside.",
            labels=["model"],
        )
        for model, one in self._rechecks.sums().items():
            name = self._name(model) or model
            checked.add_metric([name], float(one.blocks))
            different.add_metric([name], float(one.different))
        yield from (checked, different)
