"""The ledger with names of models, for Stat and the metrics.

Names are read from Ollama's manifests in a thread, rarely, and nobody waits for them. A model whose
name is not known yet is called by the first digits of its digest.
"""

from __future__ import annotations

import asyncio
import logging
import threading
import time
from collections.abc import Callable, Collection, Iterator, Mapping
from concurrent.futures import Executor
from dataclasses import asdict
from pathlib import Path
from typing import Any, Final

from ollama_tiering.protocol.pb import administration_pb2 as adm
from ollama_tiering.sidecar.ledger import Entry, Ledger
from ollama_tiering.sidecar.manifests import ManifestReader, is_blob, short_name
from ollama_tiering.store import block_store_pb2 as pb

log = logging.getLogger(__name__)

_REFRESH_SECONDS: Final = 60.0  # between two looks at the manifests
_LEAST_SECONDS: Final = 2.0  # ... also if a model without a name appears


class ModelBook:
    """Thread-safe. `models` is Ollama's directory; None means its default place."""

    def __init__(
        self,
        ledger: Ledger,
        models: Path | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.ledger = ledger
        self._reader = ManifestReader(models)
        self._clock = clock
        self._reading = threading.Lock()
        self._read_at: float | None = None
        self._names: Mapping[str, tuple[str, ...]] = {}

    def book(self, report: pb.RunnerReport) -> bool:
        """Returns whether names should be read: this model's name is not known,
        but may be by now.
        """
        self.ledger.book(report)
        unnamed = is_blob(report.model) and report.model not in self._names
        return unnamed and not self._read_lately()

    def name(self, model: str) -> str:
        """The first of the model's names; empty if none is known. Any file name can be sent."""
        return next(iter(self._names.get(model, ())), "").encode(errors="replace").decode()

    def shown(self) -> list[tuple[str, Entry]]:
        """Pairs (what to call the model, entry) of all namespaces."""
        return [(self.shown_name(one.model), one) for one in self.ledger.entries().values()]

    def shown_name(self, model: str) -> str:
        """What to call a model, given its file name."""
        return self.name(model) or short_name(model) or "?"

    def messages(self, loaded: Collection[bytes]) -> list[adm.ModelUse]:
        """`loaded` are the namespaces of living runners."""
        return [
            self._message(namespace, one, loaded=namespace in loaded)
            for namespace, one in self.ledger.entries().items()
        ]

    def days(self, most: int) -> Iterator[adm.DayOfModel]:
        """Of the last `most` days, today's last."""
        for date, model, sums in self.ledger.days.last(most):
            numbers: dict[str, Any] = asdict(sums)
            yield adm.DayOfModel(date=date, model=model, name=self.name(model), **numbers)

    def refresh(self) -> None:
        """May block. Returns at once if another thread is doing it, because the disk may hang."""
        if not self._reading.acquire(blocking=False):
            return
        try:
            self._read_at = self._clock()
            self._names = self._reader.read().of_blob
        finally:
            self._reading.release()

    def _read_lately(self) -> bool:
        return self._read_at is not None and self._clock() - self._read_at < _LEAST_SECONDS

    async def keep_up(self, pool: Executor) -> None:
        """Refreshes the names now and then, until it is cancelled."""
        while True:
            if self.ledger.entries():
                try:
                    await asyncio.get_running_loop().run_in_executor(pool, self.refresh)
                except Exception:
                    log.exception("names of models not read")
            await asyncio.sleep(_REFRESH_SECONDS)

    def _message(self, namespace: bytes, one: Entry, *, loaded: bool) -> adm.ModelUse:
        counts = one.counts
        return adm.ModelUse(
            namespace=namespace,
            model=one.model,
            name=self.name(one.model),
            engine=one.engine,
            loaded=loaded,
            since_unix_seconds=one.since,
            last_used_unix_seconds=one.last_used,
            requests=counts.requests,
            prompt_tokens=counts.prompt_tokens,
            memory_tokens=counts.memory_tokens,
            restored_tokens=counts.restored_tokens,
            recomputed_tokens=counts.recomputed_tokens,
            prefill_tokens=counts.prefill_tokens,
            prefill_seconds=counts.prefill_seconds,
            restore_seconds=counts.restore_seconds,
            shortfalls=counts.shortfalls.messages(),
        )
