"""What a Prometheus server reads from the sidecar, as values by name and labels."""

from __future__ import annotations

import socket
import urllib.request
from collections.abc import Iterable
from pathlib import Path

from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.metrics_core import Metric
from prometheus_client.parser import text_string_to_metric_families

from tests.sidecar import SidecarProcess


class Scrape:
    def __init__(self, text: str) -> None:
        self.text = text
        self.families: list[Metric] = list(text_string_to_metric_families(text))
        self.values = {
            (sample.name, frozenset(sample.labels.items())): sample.value
            for family in self.families
            for sample in family.samples
        }

    def __call__(self, name: str, **labels: str) -> float:
        return self.values[name, frozenset(labels.items())]

    @property
    def names(self) -> set[str]:
        return {name for name, _ in self.values}

    def labels(self, name: str) -> dict[str, set[str]]:
        """Label names of one metric, each with the values it has."""
        found: dict[str, set[str]] = {}
        for sample_name, labels in self.values:
            for label, value in labels if sample_name == name else ():
                found.setdefault(label, set()).add(value)
        return found

    def total(self, name: str) -> float:
        return sum(value for (sample_name, _), value in self.values.items() if sample_name == name)


def of_registry(registry: CollectorRegistry) -> Scrape:
    return Scrape(generate_latest(registry).decode())


def of_port(port: int, headers: Iterable[tuple[str, str]] = ()) -> Scrape:
    request = urllib.request.Request(f"http://127.0.0.1:{port}/metrics", headers=dict(headers))
    with urllib.request.urlopen(request, timeout=10) as answer:
        assert answer.status == 200
        assert answer.headers["Content-Type"].startswith("text/plain")
        return Scrape(answer.read().decode())


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as probe:
        return int(probe.getsockname()[1])


class MeteredSidecar(SidecarProcess):
    def __init__(self, root: Path) -> None:
        super().__init__(root)
        self.port = free_port()

    def command(self) -> list[str]:
        return [*super().command(), "--metrics-port", str(self.port)]
