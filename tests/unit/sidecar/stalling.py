"""A real sidecar that stands still on demand: `stalling.py DIRECTORY sidecar OPTIONS…`.

While DIRECTORY/mover exists the mover's thread does not come back from a piece of work; while
DIRECTORY/loop exists a Stat call holds up the event loop.
"""

from __future__ import annotations

import sys
import time
from pathlib import Path
from typing import Any

from ollama_tiering.cli import main
from ollama_tiering.sidecar.service import BlockStoreService
from ollama_tiering.store.upkeep.mover import Mover

PLACE = Path(sys.argv[1])


def wait_while(name: str) -> None:
    while (PLACE / name).exists():
        time.sleep(0.01)


step, stat = Mover.step, BlockStoreService.Stat


def slow_step(self: Mover) -> bool:
    wait_while("mover")
    return step(self)


async def slow_stat(self: BlockStoreService, request: Any, context: Any) -> Any:
    wait_while("loop")
    return await stat(self, request, context)


Mover.step = slow_step  # type: ignore[method-assign]
BlockStoreService.Stat = slow_stat  # type: ignore[method-assign]
main(sys.argv[2:])
