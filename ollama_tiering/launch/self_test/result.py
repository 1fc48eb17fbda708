"""What came of each check, and a report of it that a person can send."""

from __future__ import annotations

import platform
import time
from collections.abc import Sequence
from dataclasses import dataclass

from ollama_tiering import config
from ollama_tiering.errors import TieringError
from ollama_tiering.patchset.llama_server.installation import InstalledOllama


@dataclass(frozen=True, slots=True)
class CheckResult:
    """`error` if it failed; `not_tiered`: why the model of the check is refused by the tree itself;
    `told`: the ends of the servers' logs, if it failed.
    """

    name: str
    kind: str
    seconds: float
    error: TieringError | None
    not_tiered: str
    told: str

    @property
    def passed(self) -> bool:
        return self.error is None and not self.not_tiered

    def line(self) -> str:
        said = "passed"
        if self.error is not None:
            said = f"FAILED: {self.error.message}"
        elif self.not_tiered:
            said = f"refused: {self.not_tiered}"
        return f"{self.seconds:5.1f} s  {self.name}: {said}"


def write(results: Sequence[CheckResult], installed: InstalledOllama, seconds: float) -> str:
    """Into the state directory. Returns the file's path, or why there is none."""
    version = installed.version()
    head = [
        f"Self-test of llama-server, {time.strftime('%Y-%m-%d %H:%M', time.gmtime())} UTC",
        f"Ollama {version}, {installed.build()}",
        f"{platform.platform()}, {platform.machine()}, Python {platform.python_version()}",
        f"{len(results)} checks in {seconds:.0f} s",
        "",
        *(one.line() for one in results),
    ]
    tails = [f"\n== {one.name}\n{one.told}" for one in results if one.told]
    path = config.state_dir() / f"self-test-{version}.txt"
    try:
        path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        path.write_text("\n".join([*head, *tails]) + "\n", encoding="utf-8")
    except OSError as error:
        return f"cannot be written: {error}"
    return str(path)
