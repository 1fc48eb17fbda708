"""What was done for each model, as Prometheus metrics by the model's name.

Nothing is counted here: every scrape takes the ledger, and what the runners last reported, as it
is. A name stands for all namespaces of models that have it. What was not measured yet is not shown.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator
from typing import Final

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily
from prometheus_client.metrics_core import Metric
from prometheus_client.registry import Collector

from ollama_tiering.protocol.seconds_saved import Saved
from ollama_tiering.protocol.shortfalls import Shortfalls
from ollama_tiering.sidecar.ledger import Counts, file_name
from ollama_tiering.sidecar.model_book import ModelBook
from ollama_tiering.sidecar.runners import RunnerTable

_SOURCES: Final = (
    ("memory", "memory_tokens"),
    ("restored", "restored_tokens"),
    ("recomputed", "recomputed_tokens"),
)


class ModelCollector(Collector):
    """`runners`: those that are alive, for what they have still to store."""

    def __init__(self, book: ModelBook, runners: RunnerTable | None = None) -> None:
        self._book = book
        self._runners = runners or RunnerTable()

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
        short = CounterMetricFamily(
            "tiering_model_short_requests",
            "Requests that computed more than the last token, by model and by the reason.",
            labels=("model", "reason"),
        )
        short_tokens = CounterMetricFamily(
            "tiering_model_short_tokens",
            "Tokens of prompts that these requests computed, by model and by the reason.",
            labels=("model", "reason"),
        )
        for name, counts in uses.items():
            requests.add_metric([name], sum(one.requests for one in counts))
            for source, field in _SOURCES:
                tokens.add_metric([name, source], sum(getattr(one, field) for one in counts))
            restoring.add_metric([name], sum(one.restore_seconds for one in counts))
            if measured := sum(one.prefill_seconds for one in counts):
                speed.add_metric([name], sum(one.prefill_tokens for one in counts) / measured)
            shortfalls = functools.reduce(Shortfalls.plus, (one.shortfalls for one in counts))
            for reason, (number, computed) in shortfalls.by_name().items():
                short.add_metric([name, reason], number)
                short_tokens.add_metric([name, reason], computed)
            seconds = Saved.of(counts).seconds
            if seconds is not None:
                saved.add_metric([name], seconds)
        yield from (requests, tokens, restoring, speed, saved, short, short_tokens)
        yield self._to_store()

    def _to_store(self) -> Metric:
        waiting: dict[str, int] = {}
        for runner in self._runners.alive():
            if runner.tiered:
                name = self._book.shown_name(file_name(runner.model))
                waiting[name] = waiting.get(name, 0) + runner.to_store
        to_store = GaugeMetricFamily(
            "tiering_model_to_store",
            "Conversations that wait to be stored, by model; of models that are loaded.",
            labels=("model",),
        )
        for name, number in waiting.items():
            to_store.add_metric([name], number)
        return to_store
