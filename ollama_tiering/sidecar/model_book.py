"""The ledger by names: what Stat and the metrics say of each model.

Names are read from Ollama's manifests in a thread, seldom, and nobody waits for them: a model whose
name is not known yet goes by the first digits of its digest.
"""

from __future__ import annotations

import asyncio
import logging
import threading
import time
from collections.abc import Callable, Collection, Mapping
from concurrent.futures import Executor
from pathlib import Path
from typing import Final

from ollama_tiering.sidecar.ledger import Entry, Ledger
from ollama_tiering.sidecar.manifests import ManifestReader, is_blob, short_name
from ollama_tiering.store import block_store_pb2 as pb

log = logging.getLogger(__name__)

_REFRESH_SECONDS: Final = 60.0  # between two looks at the manifests
_LEAST_SECONDS: Final = 2.0  # ... also where a model without a name is heard of


class ModelBook:
    """Thread-safe. `models` is Ollama's directory; None: wherever it is by default."""

    def __init__(
        self,
        ledger: Ledger,
        models: Path | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._ledger = ledger
        self._reader = ManifestReader(models)
        self._clock = clock
        self._reading = threading.Lock()
        self._read_at: float | None = None
        self._names: Mapping[str, tuple[str, ...]] = {}

    def book(self, report: pb.RunnerReport) -> bool:
        """Whether names should be looked for: the model's is not known, and may be by now."""
        self._ledger.book(report)
        unnamed = is_blob(report.model) and report.model not in self._names
        return unnamed and not self._read_lately()

    def name(self, model: str) -> str:
        """The first of its names; empty when none is known. Whatever a file may be called, it can
        be sent.
        """
        return next(iter(self._names.get(model, ())), "").encode(errors="replace").decode()

    def shown(self) -> list[tuple[str, Entry]]:
        """(what to call its model, entry) of every namespace."""
        return [(self.shown_name(one.model), one) for one in self._ledger.entries().values()]

    def shown_name(self, model: str) -> str:
        """What to call a model, by its file name."""
        return self.name(model) or short_name(model) or "?"

    def messages(self, loaded: Collection[bytes]) -> list[pb.ModelUse]:
        """`loaded`: the namespaces that living runners have."""
        return [
            self._message(namespace, one, loaded=namespace in loaded)
            for namespace, one in self._ledger.entries().items()
        ]

    def refresh(self) -> None:
        """May block. At once over while another thread is at it: the disk may hang."""
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
        """Until cancelled."""
        while True:
            if self._ledger.entries():
                try:
                    await asyncio.get_running_loop().run_in_executor(pool, self.refresh)
                except Exception:
                    log.exception("names of models not read")
            await asyncio.sleep(_REFRESH_SECONDS)

    def _message(self, namespace: bytes, one: Entry, *, loaded: bool) -> pb.ModelUse:
        counts = one.counts
        return pb.ModelUse(
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
