"""After an update of the installed Ollama: a tree of links for the new one, made while that serves
as stock. `tiering patch` does it, in a process of its own and at the lowest priority.
"""

from __future__ import annotations

import shutil
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

from ollama_tiering.launch.computing import Computing
from ollama_tiering.launch.process import Child, package_path, start
from ollama_tiering.patchset.llama_server import built
from ollama_tiering.patchset.llama_server import installation as installed
from ollama_tiering.patchset.llama_server.installation import FileState
from ollama_tiering.patchset.llama_server.link_tree import LinkTree

QUIET_SECONDS: Final = 300.0  # without a prompt: what a loaded model holds is lost with its server
_LOWEST: Final = ("-n", "19")
_STOP_SECONDS: Final = 5.0


@dataclass(slots=True)
class Renewal:
    """`program` is the name by which the installed one is found; `named_source` is
    --llama-source. Not thread-safe.
    """

    program: Path
    named_source: str | None
    log: Path
    say: Callable[[str], None]
    clock: Callable[[], float] = time.monotonic
    _maker: Child | None = None
    _made_for: FileState | None = None
    _computing: Computing = field(default_factory=Computing)
    _quiet_since: float | None = None

    def begin(self) -> bool:
        """Starts `tiering patch`. False if that has no name for such an Ollama."""
        found = installed.at(self.program)
        if found is None or self.program.parent.name != "bin":
            return False
        command: list[str | Path] = [sys.executable, "-m", "ollama_tiering", "patch"]
        command += ["--ollama", self.program.parent.parent]
        if self.named_source:
            command += ["--llama-source", self.named_source]
        if nice := shutil.which("nice"):
            command = [nice, *_LOWEST, *command]
        self._made_for = found.state()
        self._maker = start(
            "tiering patch", *command, log=self.log, env=package_path(), leashed=True
        )
        return True

    def tree(self, server_pid: int) -> LinkTree | None:
        """The tree, once it is made and nothing of value is lost by going over to it: no model is
        loaded, or none has computed for QUIET_SECONDS. Asked now and then. If Ollama was updated
        once more meanwhile, it is made once more; if it cannot be made, that is said once.
        """
        maker = self._maker
        if maker is None or maker.running:
            return None
        if maker.exit_code == 0 and not self._is_quiet(server_pid, self.clock()):
            return None  # before the tree is looked for, which reads all of our sources
        found = installed.at(self.program)
        if found is None:
            return None  # an installer is at work
        made = built.current(found) if maker.exit_code == 0 else None
        if made is None:
            self._maker = None
            again = found.state() != self._made_for and self.begin()
            if not again:
                how = maker.how_it_ended()
                self.say(f"Ollama goes on as stock: `tiering patch` {how}; log: {self.log}")
        return made

    def stop(self) -> None:
        if self._maker:
            self._maker.stop(seconds=_STOP_SECONDS)

    def _is_quiet(self, server_pid: int, now: float) -> bool:
        if self._computing.look(server_pid, now) or self._quiet_since is None:
            self._quiet_since = now
        long_quiet = now - self._quiet_since >= QUIET_SECONDS
        return long_quiet or not self._computing.has_models
