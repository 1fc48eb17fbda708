"""An installed Ollama that is updated while its tree of links serves.

What is loaded goes on: the files that it has open are the old ones. A model that is loaded from now
on would mix old and new libraries. So the server is replaced by the installed one, as stock, once
that is whole and nothing is computed.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

import psutil

from ollama_tiering.patchset.llama_server import built
from ollama_tiering.patchset.llama_server import installation as installed
from ollama_tiering.patchset.llama_server.installation import FileState, InstalledOllama

SETTLED_SECONDS: Final = 10.0  # without a change: an installer unpacks for minutes
LONGEST_SECONDS: Final = 300.0  # then an answer that is still computed is cut
_BUSY_SHARE: Final = 0.05  # of one core, from one look to the next


@dataclass(slots=True)
class Outdated:
    """`fits` says whether the tree is for the files that are installed. `program` is the name by
    which the installed one is found also after an update. Not thread-safe.
    """

    installation: InstalledOllama
    program: Path
    fits: Callable[[], bool]
    say: Callable[[str], None]
    clock: Callable[[], float] = time.monotonic
    _state: FileState | None = None  # None: nothing has changed
    _since: float = 0.0  # nothing has changed any more
    _work: dict[int, float] = field(default_factory=dict)
    _looked: float = 0.0

    def due(self, server_pid: int) -> bool:
        """Whether the server is to be replaced now. Asked now and then; reads no file, only what
        the file system knows of each.
        """
        now = self.clock()
        busy = self._is_busy(server_pid, now)
        if self.fits():
            self._state = None
            return False
        now_there = installed.at(self.program)
        state = (now_there or self.installation).state()
        if self._state is None:
            self.say(
                f"{self.program} was updated or changed: what is loaded goes on; "
                "the installed one takes over, as stock, once it is whole and nothing is computed"
            )
        if state != self._state or now_there is None:
            self._state, self._since = state, now
            return False
        settled = now - self._since
        return settled >= SETTLED_SECONDS and (not busy or settled >= LONGEST_SECONDS)

    def _is_busy(self, server_pid: int, now: float) -> bool:
        """Whether one of its llama-servers computes, by the time of processors that it took."""
        before, self._work = self._work, _processor_seconds(server_pid)
        seconds, self._looked = now - self._looked, now
        return any(
            work - before.get(pid, 0.0) > _BUSY_SHARE * seconds for pid, work in self._work.items()
        )


def of_tree(
    installation: InstalledOllama, binary: Path, say: Callable[[str], None]
) -> Outdated | None:
    """Returns None if `binary` is no tree's."""
    tree = built.tree_with(binary)
    if tree is None:
        return None
    return Outdated(installation, Path(tree.program), lambda: tree.fits(installation), say)


def _processor_seconds(server_pid: int) -> dict[int, float]:
    """Reads them for each child."""
    found: dict[int, float] = {}
    with contextlib.suppress(psutil.Error):
        for child in psutil.Process(server_pid).children(recursive=True):
            with contextlib.suppress(psutil.Error):
                times = child.cpu_times()
                found[child.pid] = times.user + times.system
    return found
