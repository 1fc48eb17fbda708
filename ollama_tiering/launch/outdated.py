"""An installed Ollama that is updated while its tree of links serves.

What is loaded goes on: the files that it has open are the old ones. A model that is loaded from now
on would mix old and new libraries. So the server is replaced by the installed one, as stock, once
that is whole and nothing is computed.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

from ollama_tiering.launch.after_update import SETTLED_SECONDS
from ollama_tiering.launch.computing import Computing
from ollama_tiering.patchset.llama_server import built
from ollama_tiering.patchset.llama_server import installation as installed
from ollama_tiering.patchset.llama_server.installation import FileState, InstalledOllama

LONGEST_SECONDS: Final = 300.0  # then an answer that is still computed is cut


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
    _computing: Computing = field(default_factory=Computing)

    def due(self, server_pid: int) -> bool:
        """Whether the server is to be replaced now. Asked now and then; reads no file, only what
        the file system knows of each.
        """
        now = self.clock()
        busy = self._computing.look(server_pid, now)
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


def of_tree(
    installation: InstalledOllama, binary: Path, say: Callable[[str], None]
) -> Outdated | None:
    """Returns None if `binary` is no tree's."""
    tree = built.tree_with(binary)
    if tree is None:
        return None
    return Outdated(installation, Path(tree.program), lambda: tree.fits(installation), say)
