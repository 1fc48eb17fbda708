"""Whether the sidecar lives, and whether it serves: each a reason against it, or nothing.

Alive is what the service manager's watchdog goes by, too: the event loop answers, and the thread
that moves blocks begins a piece of work now and then. A disk that stalls for a minute is weather.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from http import HTTPStatus
from typing import Final

from ollama_tiering.sidecar.endpoint import Answer, Page, Request, text
from ollama_tiering.store import TieredStore

_LOOP_SECONDS: Final = 2.0
_MOVER_SECONDS: Final = 300.0


class Standing:
    """Made on the event loop that serves; asked on another."""

    def __init__(self, store: TieredStore) -> None:
        self._store = store
        self._serving_loop = asyncio.get_running_loop()
        self.phase = "starting"  # then "serving", "stopping"

    async def against_alive(self) -> str:
        answer = asyncio.run_coroutine_threadsafe(asyncio.sleep(0), self._serving_loop)
        try:
            await asyncio.wait_for(asyncio.wrap_future(answer), _LOOP_SECONDS)
        except TimeoutError:
            return "calls are not answered: the event loop is held up"
        silent = self._store.mover_silent_seconds()
        if silent > _MOVER_SECONDS:
            return f"the thread that moves blocks has been silent for {silent:.0f} s"
        return ""

    async def against_ready(self) -> str:
        if self.phase != "serving":
            return self.phase
        waiting = [tier.kind.label for tier in self._store.report().tiers if not tier.surveyed]
        return f"not scanned yet: {', '.join(waiting)}" if waiting else ""


def standing_pages(standing: Standing) -> dict[str, Page]:
    return {
        "/healthz": _page("alive", standing.against_alive),
        "/readyz": _page("ready", standing.against_ready),
    }


def _page(good: str, reason_against: Callable[[], Awaitable[str]]) -> Page:
    """200 and the word, or 503 and the reason."""

    async def answer(_: Request) -> Answer:
        reason = await reason_against()
        return text(HTTPStatus.SERVICE_UNAVAILABLE, reason) if reason else text(HTTPStatus.OK, good)

    return answer
