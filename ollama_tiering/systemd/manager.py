"""The running service manager, where there is one: told of new units, asked about its services."""

from __future__ import annotations

import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Final

from ollama_tiering.errors import ServiceError
from ollama_tiering.patchset.run import run

_ALIVE: Final = ("active", "activating", "deactivating", "reloading")
_RUNNING: Final = Path("/run/systemd/system")


class Manager:
    """systemctl, with or without --user. `present` is False in a container or for another root."""

    def __init__(self, *, user_mode: bool, root: Path | None) -> None:
        self._mode = ("--user",) if user_mode else ()
        self.present = root is None and _RUNNING.is_dir() and shutil.which("systemctl") is not None

    def reload(self) -> None:
        if self.present:
            self._ask("daemon-reload")

    def start(self, units: Sequence[str]) -> None:
        if not self.present:
            raise ServiceError(
                "no service manager runs here", hint="install without --now, start them later"
            )
        self._ask("enable", "--now", *units)

    def stop(self, units: Sequence[str]) -> None:
        """Also those that were never started, or whose file is gone."""
        for unit in units if self.present else ():
            run("systemctl", *self._mode, "disable", "--now", unit)
            if (state := self.state(unit)) in _ALIVE:
                raise ServiceError(
                    f"{unit} is {state} still", hint=f"{self.command('stop', unit)}, then again"
                )

    def state(self, unit: str) -> str:
        """`active`, `inactive`, `failed` …; empty where nobody can be asked."""
        if not self.present:
            return ""
        return run("systemctl", *self._mode, "is-active", unit).stdout.strip()

    def command(self, *words: str) -> str:
        """What a person would type."""
        return " ".join(("systemctl", *self._mode, *words))

    def _ask(self, *words: str) -> None:
        done = run("systemctl", *self._mode, *words)
        if done.returncode:
            raise ServiceError(
                f"`{self.command(*words)}` failed: {' '.join(done.tail[-2:])}",
                hint="run it by hand to see more",
            )
