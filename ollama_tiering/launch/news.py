"""Says once of each runner whether its model is tiered; what a person would else never learn."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from ollama_tiering.launch.block_service import ask


class RunnerNews:
    """Call it now and then. Says nothing while the sidecar does not answer."""

    def __init__(self, socket: Path, say: Callable[[str], None]) -> None:
        self._socket = socket
        self._say = say
        self._known: set[int] = set()

    def __call__(self) -> None:
        answer = ask(self._socket)
        if answer is None:
            return
        for report in answer.runners:
            if report.pid not in self._known:
                model = report.model.removeprefix("sha256-")[:12]
                refused = [t for t in answer.model_terms if report.namespace in t.namespaces]
                if report.tiered and refused and refused[0].refusal:
                    how = f"is not stored: {refused[0].refusal}"
                else:
                    how = "is tiered" if report.tiered else f"is not tiered: {report.reason}"
                exact = report.cpu_attention.startswith("exact")
                attention = f", attention {report.cpu_attention}" if exact else ""
                self._say(f"model {model} loaded, {how}{attention}")
        self._known = {report.pid for report in answer.runners}
