"""A tree of links for an installed Ollama that is being updated: made once that is done."""

from __future__ import annotations

import shutil
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from ollama_tiering import config
from ollama_tiering.errors import BuildError, ServiceError, TieringError, UsageError
from ollama_tiering.launch.llama_up import make_tree
from ollama_tiering.launch.unharmed import in_one_line
from ollama_tiering.patchset.llama_server import built
from ollama_tiering.patchset.llama_server.built import BuildRequest
from ollama_tiering.patchset.llama_server.installation import (
    FileState,
    InstalledOllama,
    OlderOllama,
)
from ollama_tiering.patchset.llama_server.link_tree import LinkTree
from ollama_tiering.patchset.report import Report

SETTLED_SECONDS: Final = 10.0  # without a change: an installer unpacks for minutes
LONGEST_SECONDS: Final = 3600.0  # then nobody updates it any more
LEAST_FREE_BYTES: Final = 2_000_000_000  # chosen: a tree has 40 MB, its making takes more
LEAST_FREE_PART: Final = 20  # of the disk: half of what the store leaves free
_LOOK_SECONDS: Final = 2.0
_UNTIL: Final = "until no file of Ollama changes any more"


@dataclass(slots=True)
class AfterUpdate:
    """`find` returns what is installed, or None if that is not what is to be patched; it raises a
    TieringError where that is gone or not whole, as it is while an installer is at work. `tell` is
    given a line for each step, also where `report` is quiet.
    """

    find: Callable[[], InstalledOllama | None]
    report: Report
    tell: Callable[[str], None]
    clock: Callable[[], float] = time.monotonic
    sleep: Callable[[float], None] = time.sleep

    def tree(self, request: BuildRequest) -> LinkTree:
        """Returns at once where there is one for what is installed. TieringError if it cannot be
        made; ServiceError if files still change after LONGEST_SECONDS. If an update comes while it
        is made, it is made once more.
        """
        deadline = self.clock() + LONGEST_SECONDS
        while True:
            found = self._settled(deadline)
            if done := built.current(found):
                self.tell(f"{done.binary} is up to date")
                return done
            state = found.state()
            try:
                _require_room(config.cache_dir())
                tree = make_tree(found, request, self.report)
            except TieringError as error:
                if found.state() == state:
                    raise
                self.tell(f"{found.program} was changed meanwhile: {in_one_line(error)}")
            else:
                self.tell(f"the next start of Ollama {tree.version} is tiered")
                return tree

    def _settled(self, deadline: float) -> InstalledOllama:
        """What is installed, once none of its files has changed for SETTLED_SECONDS, or as it is
        now if it has its tree.
        """
        seen: FileState = []  # nothing whole
        since, said = 0.0, False
        while True:
            found, why = self._look()
            if found and not said and built.current(found):
                return found
            state, now = found.state() if found else [], self.clock()
            if found is None or state != seen:
                seen, since = state, now
            elif now - since >= SETTLED_SECONDS:
                return found
            if now >= deadline:
                raise why
            if not said:
                self.tell(f"waiting {_UNTIL if found else f'for Ollama: {why.message}'}")
                said = True
            self.sleep(_LOOK_SECONDS)

    def _look(self) -> tuple[InstalledOllama | None, TieringError]:
        """What is installed now, and the error if it stays so."""
        try:
            found = self.find()
        except OlderOllama:  # no wait makes it another one
            raise
        except TieringError as error:
            return None, error
        if found is None:
            raise UsageError(
                "no installed Ollama of v0.30 or later is to be patched",
                hint="name it: --ollama DIR",
            )
        return found, ServiceError(
            f"{found.program} or its libraries change again and again",
            hint="see what writes there; then: tiering patch",
        )


def _require_room(folder: Path) -> None:
    """BuildError where little is free: nobody looks on, and other services need that disk."""
    there = next(step for step in (folder, *folder.parents) if step.exists())
    disk = shutil.disk_usage(there)
    needed = max(LEAST_FREE_BYTES, disk.total // LEAST_FREE_PART)
    if disk.free < needed:
        raise BuildError(
            f"{folder}: {config.format_size(disk.free)} of its disk are free, and "
            f"{config.format_size(needed)} must be before a tree is made unattended",
            hint="free some; or make it by hand: tiering patch",
        )
