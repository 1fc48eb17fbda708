"""The servers of one `tiering up`: the first, and those that take over. They are the installed
Ollama as stock, if the tree that serves is for other files, and then a tree that is made for these.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

from ollama_tiering.launch import ollama
from ollama_tiering.launch.llama_up import named_source
from ollama_tiering.launch.outdated import Outdated, of_tree
from ollama_tiering.launch.process import Child, rotate
from ollama_tiering.launch.renewal import Renewal
from ollama_tiering.launch.unharmed import unharmed
from ollama_tiering.patchset.llama_server import installation as installed
from ollama_tiering.patchset.llama_server import tree_use
from ollama_tiering.patchset.llama_server.link_tree import LinkTree
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
    _renewal: Renewal | None = None
    _uses: ExitStack = field(default_factory=ExitStack)  # trees that are served, until we end

    def first(self, *, tiered: bool) -> Child:
        """ServiceError if it does not start."""
        server = self._start(tiered=tiered)
        stock = self.request.installed
        if stock is None:
            return server
        if tiered and (other := other_program(server.pid, self.binary)):
            self.report.warn(
                f"Ollama serves as stock, without its cache: {self.binary} starts {other}, which "
                "has its own llama-server (name the folder of the real one: --ollama DIR)"
            )
            server.stop(seconds=ollama.STOP_SECONDS, hurry=self.interrupted)
            self.binary = stock.program
            return self._start(tiered=False)
        with unharmed(self.report.warn, "an update of Ollama is not noticed"):
            self._outdated = of_tree(stock, self.binary, self.report.say)
        return server

    def successor(self, pair: Pair) -> Child | None:
        """One that is to serve from now on, if there is one. ServiceError if it does not start."""
        pid = pair.server.pid
        try:
            if self._renewal and (tree := self._renewal.tree(pid)):
                return self._over_to(tree, pair)
            if self._outdated and self._outdated.due(pid):
                return self._over_to_stock(self._outdated, pair)
        except KeyboardInterrupt:  # an end was asked for meanwhile
            pass
        return None

    def close(self) -> None:
        """Ends what is made for a server that is not needed any more."""
        if self._renewal:
            self._renewal.stop()

    def _over_to_stock(self, outdated: Outdated, pair: Pair) -> Child:
        before, self.binary, self._outdated = self.binary, outdated.program, None
        with unharmed(self.report.warn, "no tree is made for the updated Ollama"):
            log = rotate(self.request.patch_log, self.report.warn)
            made = Renewal(outdated.program, named_source(before), log, self.report.say)
            self._renewal = made if pair.service and made.begin() else None
        self.report.say(
            "going over to the installed Ollama, as stock, until `tiering patch` has made a tree "
            f"for it; log: {self.request.patch_log}"
            if self._renewal
            else "going over to the installed Ollama, as stock; to tier that one, end this, run "
            "`tiering patch`, then `tiering up` again"
        )
        pair.stop_server()
        return self._start(tiered=False)

    def _over_to(self, tree: LinkTree, pair: Pair) -> Child | None:
        """Not to one that is removed just now; nor where the sidecar does not run."""
        self._renewal = None
        found = installed.at(Path(tree.program))
        if found is None or pair.service is None or not tree_use.hold(tree.folder, self._uses):
            return None
        self.binary = tree.binary
        self.report.say(f"going over to {tree.binary}, which is patched as {tree.version}")
        pair.stop_server()
        server = self._start(tiered=True)
        with unharmed(self.report.warn, "an update of Ollama is not noticed"):
            self._outdated = of_tree(found, self.binary, self.report.say)
        return server

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
