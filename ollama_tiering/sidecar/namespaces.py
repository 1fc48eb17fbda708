"""The model and engine of each namespace's blocks, for Stat.

They are read from small files on a disk that may hang. At most one thread waits for that disk, and
no answer waits for it: a namespace that was not read yet has no model and engine in it.
"""

from __future__ import annotations

import asyncio
import logging
import math
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Executor
from typing import Final

from ollama_tiering.protocol.pb import administration_pb2 as adm
from ollama_tiering.store import Fields, NamespaceId

log = logging.getLogger(__name__)

_PATIENCE_SECONDS: Final = 0.2  # of one answer
_AGAIN_SECONDS: Final = 60.0  # a namespace without a description may get one


class NamespaceUses:
    """A description is read once, because a namespace is the digest of its description. To be used
    on one event loop. `describe` may block; it runs in the pool, one call at a time.
    """

    def __init__(
        self,
        describe: Callable[[NamespaceId], Fields],
        pool: Executor,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._describe = describe
        self._pool = pool
        self._clock = clock
        # Of the namespaces that were asked for last: fields, and until when they are right.
        self._known: dict[NamespaceId, tuple[Fields, float]] = {}
        self._reading: asyncio.Task[None] | None = None

    async def messages(self, counts: Sequence[tuple[NamespaceId, int]]) -> list[adm.NamespaceUse]:
        """One message for each pair (namespace, blocks)."""
        now = self._clock()
        names = [name for name, _ in counts]
        self._known = {name: self._known[name] for name in names if name in self._known}
        wanted = [name for name in names if self._known.get(name, ((), now))[1] <= now]
        if wanted:
            if self._reading is None or self._reading.done():
                self._reading = asyncio.create_task(self._read(wanted))
            await asyncio.wait({self._reading}, timeout=_PATIENCE_SECONDS)
        return [self._message(name, blocks) for name, blocks in counts]

    async def _read(self, names: Sequence[NamespaceId]) -> None:
        loop = asyncio.get_running_loop()
        try:
            found = await loop.run_in_executor(
                self._pool, lambda: [self._describe(name) for name in names]
            )
        except Exception as error:  # RuntimeError: the sidecar ends
            log.debug("names of models not read: %s", error)
            return
        again = self._clock() + _AGAIN_SECONDS
        for name, fields in zip(names, found, strict=True):
            self._known[name] = (fields, math.inf if fields else again)

    def _message(self, name: NamespaceId, blocks: int) -> adm.NamespaceUse:
        fields = dict(self._known.get(name, ((), 0.0))[0])
        return adm.NamespaceUse(
            namespace=name,
            blocks=blocks,
            model=fields.get("model", ""),
            engine=fields.get("engine", ""),
        )
