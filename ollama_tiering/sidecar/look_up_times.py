"""How long engines wait for the answer to a look-up, over both wires, as a Prometheus metric."""

from __future__ import annotations

from contextlib import AbstractContextManager
from typing import Final

from prometheus_client import CollectorRegistry, Histogram

# Seconds. An engine waits for 0.08 s at least, and goes on without an answer then.
_BUCKETS: Final = (0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.08, 0.25, 1.0)


class LookUpTimes:
    """Thread-safe."""

    def __init__(self, registry: CollectorRegistry | None = None) -> None:
        self._seconds = Histogram(
            "tiering_lookup_seconds",
            "Seconds from the arrival of an engine's look-up to what is worth restoring.",
            buckets=_BUCKETS,
            registry=registry,
        )

    def measured(self) -> AbstractContextManager[object]:
        return self._seconds.time()
