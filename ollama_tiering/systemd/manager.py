"""The running service manager, if there is one: it is told of new units and asked about its
services.
"""

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
    """systemctl, with or without --user. `present` is False in a container and for another root."""

    def __init__(self, *, user_mode: bool, root: Path | None) -> None:
        self._mode = ("--user",) if user_mode else ()
        self.other_root = root is not None
        self.present = root is None and _RUNNING.is_dir() and shutil.which("systemctl") is not None

    def reload(self) -> None:
        if self.present:
            self._ask("daemon-reload")

    def require_present(self) -> None:
        if not self.present:
            raise ServiceError(
                "no service manager runs here",
                hint="install without --now, and start the services later",
            )

    def start(self, units: Sequence[str]) -> None:
        self.require_present()
        self._ask("enable", "--now", *units)

    def restart(self, units: Sequence[str]) -> None:
        """Restarts them; those that do not run are started."""
        self.require_present()
        self._ask("restart", *units)

    def wanted(self, unit: str) -> bool:
        """Whether it runs, or failed to: nobody has stopped it."""
        return self.state(unit) in (*_ALIVE, "failed")

    def stop(self, units: Sequence[str]) -> None:
        """Stops them, also units that were never started, or whose file is gone."""
        for unit in units if self.present else ():
            run("systemctl", *self._mode, "disable", "--now", unit)
            if (state := self.state(unit)) in _ALIVE:
                raise ServiceError(
                    f"{unit} is still {state}", hint=f"{self.command('stop', unit)}, then again"
                )

    def state(self, unit: str) -> str:
        """`active`, `inactive`, `failed` …; empty if no manager can be asked."""
        if not self.present:
            return ""
        return run("systemctl", *self._mode, "is-active", unit).stdout.strip()

    def command(self, *words: str) -> str:
        """The command that a person would type."""
        return " ".join(("systemctl", *self._mode, *words))

    def _ask(self, *words: str) -> None:
        done = run("systemctl", *self._mode, *words)
        if done.returncode:
            raise ServiceError(
                f"`{self.command(*words)}` failed: {' '.join(done.tail[-2:])}",
                hint="run it by hand to see more",
            )
