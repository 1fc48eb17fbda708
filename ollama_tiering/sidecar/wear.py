"""What is written to the disk: booked to the days, and summed up for `tiering status`."""

from __future__ import annotations

import asyncio
import datetime
import logging
from concurrent.futures import Executor
from typing import Final

from ollama_tiering.protocol.pb import administration_pb2 as adm
from ollama_tiering.sidecar.days import DaySums
from ollama_tiering.sidecar.ledger import Ledger
from ollama_tiering.store import TieredStore
from ollama_tiering.store.tools.written import take_written

log = logging.getLogger(__name__)

_DAYS: Final = 30
_BOOK_SECONDS: Final = 20.0  # more often than the ledger is saved


class Wear:
    """Thread-safe."""

    def __init__(self, store: TieredStore, ledger: Ledger) -> None:
        self._store = store
        self._ledger = ledger

    def book(self) -> None:
        """What was written since the last time. Takes no time."""
        for model, written_bytes in take_written(self._store).items():
            self._ledger.book_today(model, DaySums(written_bytes=written_bytes))

    def message(self) -> adm.DiskWear:
        """Of days that are over: today's would have to be guessed."""
        found = self._ledger.days.last(_DAYS + 1)
        today = self._ledger.days.today()
        written = [date for date, _, sums in found if sums.written_bytes and date != today]
        if not written:
            return adm.DiskWear()
        first = min(written)
        counted = [sums for date, _, sums in found if first <= date < today]
        days = datetime.date.fromisoformat(today) - datetime.date.fromisoformat(first)
        return adm.DiskWear(
            days=days.days,
            written_bytes=sum(sums.written_bytes for sums in counted),
            requests=sum(sums.requests for sums in counted),
        )

    async def keep_up(self, pool: Executor) -> None:
        """Books now and then, until it is cancelled."""
        while True:
            await asyncio.sleep(_BOOK_SECONDS)
            try:
                await asyncio.get_running_loop().run_in_executor(pool, self.book)
            except Exception:
                log.exception("what was written to the disk is not booked")
