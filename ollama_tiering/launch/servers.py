"""The servers of one `tiering up`: the first, and the one that takes over where that is no use."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from ollama_tiering.launch import ollama
from ollama_tiering.launch.outdated import Outdated, of_tree
from ollama_tiering.launch.process import Child, rotate
from ollama_tiering.launch.unharmed import unharmed
from ollama_tiering.system.files import without_links

if TYPE_CHECKING:
    from ollama_tiering.launch.supervise import Pair
    from ollama_tiering.launch.up import Teller, UpRequest


@dataclass(slots=True)
class Servers:
    """`binary` is the one that runs, or is to be started. Not thread-safe."""

    request: UpRequest
    binary: Path
    report: Teller
    interrupted: Callable[[], bool]
    _outdated: Outdated | None = None

    def first(self, *, tiered: bool) -> Child:
        """ServiceError if it does not start."""
        server = self._start(tiered=tiered)
        installed = self.request.installed
        if installed is None:
            return server
        if tiered and (other := other_program(server.pid, self.binary)):
            self.report.warn(
                f"Ollama serves as stock, without its cache: {self.binary} starts {other}, which "
                "has its own llama-server (name the folder of the real one: --ollama DIR)"
            )
            server.stop(seconds=ollama.STOP_SECONDS, hurry=self.interrupted)
            self.binary = installed.program
            return self._start(tiered=False)
        with unharmed(self.report.warn, "an update of Ollama is not noticed"):
            self._outdated = of_tree(installed, self.binary, self.report.say)
        return server

    def successor(self, pair: Pair) -> Child | None:
        """The installed Ollama as stock, once the tree that serves is for other files. ServiceError
        if it does not start.
        """
        installed = self.request.installed
        if not installed or not self._outdated or not self._outdated.due(pair.server.pid):
            return None
        self.binary, self._outdated = self._outdated.program, None
        self.report.say(
            "going over to the installed Ollama, as stock; to tier that one, end this, run "
            "`tiering patch`, then `tiering up` again"
        )
        pair.stop_server()
        try:
            return self._start(tiered=False)
        except KeyboardInterrupt:  # an end was asked for meanwhile
            return None

    def _start(self, *, tiered: bool) -> Child:
        with self.report.stage(f"starting Ollama on {self.request.address}"):
            return ollama.start_server(
                self.binary,
                self.request.address,
                log=rotate(self.request.server_log, self.report.warn),
                env=self.request.environment(tiered=tiered),
                interrupted=self.interrupted,
                leashed=True,
            )


def other_program(pid: int, binary: Path) -> str:
    """What the process runs instead of `binary`, which only started it; empty where it is that
    one. A hard link has the name by which it was started.
    """
    try:
        runs = Path(f"/proc/{pid}/exe").readlink()
    except OSError:  # another system, or just ended
        return ""
    return "" if runs == without_links(binary) else str(runs)
