"""Whether what a server was started from is still there. A model that is loaded without it would be
computed by other code, with other bits, and nobody would notice.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import psutil

from ollama_tiering.launch import running_up
from ollama_tiering.patchset import finished

CURE: Final = "end `tiering up` and start it again: it builds what is missing"


@dataclass(slots=True)
class BuildWatch:
    """Is called now and then, and says it once."""

    binary: Callable[[], Path]  # which changes where another server takes over
    say: Callable[[str], None]
    _said: str = ""

    def __call__(self) -> None:
        harm = finished.harm(self.binary())
        if harm and not self._said:
            self.say(f"{what_it_means(harm)}: {CURE}")
        self._said = harm


def what_it_means(harm: str) -> str:
    return f"{harm}: the next model that is loaded may be computed by other, slower code"


def harmed() -> list[str]:
    """What is gone of the builds from which a running `tiering up` serves, in words."""
    found = (
        f"process {one.pid} serves from a build that is not whole: {harm}"
        for one in running_up.records()
        if one.binary and one.pid and psutil.pid_exists(one.pid)
        if (harm := finished.harm(Path(one.binary)))
    )
    return list(dict.fromkeys(found))
