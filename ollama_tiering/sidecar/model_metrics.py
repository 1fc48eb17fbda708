"""What was done for each model, as Prometheus metrics by the model's name.

Nothing is counted here: every scrape takes the ledger as it is. A name stands for all namespaces of
models that have it. What was not measured yet is not shown.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Final

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily
from prometheus_client.metrics_core import Metric
from prometheus_client.registry import Collector

from ollama_tiering.sidecar.ledger import Counts
from ollama_tiering.sidecar.model_book import ModelBook
from ollama_tiering.sidecar.seconds_saved import Saved

_SOURCES: Final = (
    ("memory", "memory_tokens"),
    ("restored", "restored_tokens"),
    ("recomputed", "recomputed_tokens"),
)


class ModelCollector(Collector):
    def __init__(self, book: ModelBook) -> None:
        self._book = book

    def collect(self) -> Iterator[Metric]:
        uses: dict[str, list[Counts]] = {}
        for name, entry in self._book.shown():
            uses.setdefault(name, []).append(entry.counts)
        requests = CounterMetricFamily(
            "tiering_model_requests", "Requests that have ended, by model.", labels=("model",)
        )
        tokens = CounterMetricFamily(
            "tiering_model_prompt_tokens",
            "Tokens of prompts, by model and by where their rows came from.",
            labels=("model", "source"),
        )
        restoring = CounterMetricFamily(
            "tiering_model_restore_seconds",
            "Seconds that requests waited for their rows from the store, by model.",
            labels=("model",),
        )
        speed = GaugeMetricFamily(
            "tiering_model_prefill_tokens_per_second",
            "Measured speed of computing long prompts, by model.",
            labels=("model",),
        )
        saved = GaugeMetricFamily(
            "tiering_model_saved_seconds",
            "Time to compute the restored tokens less the time of restoring, by model; may fall.",
            labels=("model",),
        )
        for name, counts in uses.items():
            requests.add_metric([name], sum(one.requests for one in counts))
            for source, field in _SOURCES:
                tokens.add_metric([name, source], sum(getattr(one, field) for one in counts))
            restoring.add_metric([name], sum(one.restore_seconds for one in counts))
            if measured := sum(one.prefill_seconds for one in counts):
                speed.add_metric([name], sum(one.prefill_tokens for one in counts) / measured)
            seconds = Saved.of(counts).seconds
            if seconds is not None:
                saved.add_metric([name], seconds)
        yield from (requests, tokens, restoring, speed, saved)
