"""What a running sidecar tells the service manager: signs of life, and a line of status.

A sign of life is sent only while two things make progress: the event loop, because this runs on it,
and the thread that moves blocks, because this looks at how long it has been silent. A write that
stalls for less than the watchdog's period is weather. After a longer stall the signs end, and the
manager restarts the sidecar.
"""

from __future__ import annotations

import asyncio
import logging
import os
from collections.abc import Callable
from typing import Final

from ollama_tiering.config import count, format_size
from ollama_tiering.sidecar.notify import notify, watchdog_seconds
from ollama_tiering.store import StoreReport, TieredStore

log = logging.getLogger(__name__)

_STATUS_SECONDS: Final = 10.0
_LEAST_SECONDS: Final = 2.0  # twice as long as the mover rests when there is nothing to do


class Alive:
    """To be used on the event loop only."""

    def __init__(self, store: TieredStore, say: Callable[[str], None] = notify) -> None:
        self._store = store
        self._say = say
        self._half_period = watchdog_seconds()
        self._stalled = False
        self._said = ""

    async def run(self) -> None:
        """Runs until it is cancelled. Returns at once if no service manager listens."""
        if not os.environ.get("NOTIFY_SOCKET"):
            return
        pause = min(self._half_period or _STATUS_SECONDS, _STATUS_SECONDS)
        while True:
            self.ping()
            try:
                self.say_status()
            except Exception:  # a line nobody needs must not end the signs of life
                log.exception("status not said")
            await asyncio.sleep(pause)

    def ping(self) -> None:
        if self._half_period is None:
            return
        silent = self._store.mover_silent_seconds()
        stalled = silent > max(2 * self._half_period, _LEAST_SECONDS)
        if stalled and not self._stalled:
            log.error("mover stalled, no more signs of life: silent_seconds=%.1f", silent)
        elif self._stalled and not stalled:
            log.warning("mover goes on")
        self._stalled = stalled
        if not stalled:
            self._say("WATCHDOG=1")

    def say_status(self) -> None:
        status = status_line(self._store.report())
        if status != self._said:
            self._said = status
            self._say(f"STATUS={status}")


def status_line(report: StoreReport) -> str:
    """`ram 12 blocks, 96.0 MiB; local 40 blocks, 1.2 GiB; 83 % of 10,000 asked tokens found`."""
    parts = [
        f"{tier.kind.label} {count(tier.blocks, 'block')}, {format_size(tier.used_bytes)}"
        f"{' (resting after an error)' if tier.suspended else ''}"
        for tier in report.tiers
    ]
    asked = report.counters.asked_tokens
    if asked:
        share = 100 * report.counters.matched_tokens / asked
        parts.append(f"{share:.0f} % of {count(asked, 'asked token')} found")
    return "; ".join(parts)
