"""What outlives one opening of the store: it is opened again when a tier that was left out can be
had.
"""

from __future__ import annotations

import asyncio
import itertools
import logging
from collections.abc import Iterator
from concurrent.futures import Executor
from typing import Final

from ollama_tiering.sidecar.engine.adoption import Decided
from ollama_tiering.store import TieredStore, can_be_opened

log = logging.getLogger(__name__)

_TRY_AGAIN_SECONDS: Final = (1.0, 2.0, 5.0, 15.0, 30.0, 60.0)  # to open what was left out


class Openings:
    """Signals may come between two of them: `told_to_end` and `reload_wanted` stay."""

    def __init__(self) -> None:
        self.told_to_end = False
        self.reload_wanted = asyncio.Event()
        self.decided: Decided = {}  # which builds' blocks an engine's process reads
        self._missing = 0
        self._waits = _waits()

    async def wait_for_one(self, store: TieredStore, pool: Executor) -> None:
        """Returns once a tier that could not be opened can be; never, if none is left out. The
        time between two tries goes on growing until one has come back indeed.
        """
        own = [one for one in store.left_out if not one.is_shared]
        if len(own) < self._missing:
            self._waits = _waits()
        self._missing = len(own)
        if not own:
            await asyncio.Event().wait()
        loop = asyncio.get_running_loop()
        while True:
            await asyncio.sleep(next(self._waits))
            for one in own:
                if await loop.run_in_executor(pool, can_be_opened, one):
                    return


def _waits() -> Iterator[float]:
    return itertools.chain(_TRY_AGAIN_SECONDS, itertools.repeat(_TRY_AGAIN_SECONDS[-1]))


def has_ended(task: asyncio.Task[None]) -> bool:
    """By itself, and not because of a bug."""
    if task.cancelled():
        return False
    if error := task.exception():
        log.error("tiers that were left out are not tried again", exc_info=error)
    return error is None


async def end_tasks() -> None:
    """Ends what still runs on the loop, which is used again."""
    others = asyncio.all_tasks() - {asyncio.current_task()}
    for task in others:
        task.cancel()
    await asyncio.gather(*others, return_exceptions=True)
