"""Says once for each runner whether its model is tiered, which a person would otherwise never
learn.

A sidecar may serve several servers; nothing is said about the runners of others.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import psutil

from ollama_tiering.launch.block_service import ask
from ollama_tiering.launch.names import first_names, models_dirs, shown


class RunnerNews:
    """Is called now and then. Says nothing as long as the sidecar does not answer."""

    def __init__(
        self,
        socket: Path,
        say: Callable[[str], None],
        server_pid: Callable[[], int],
        models: Path | None = None,
    ) -> None:
        """`server_pid`: another server may take over. `models`: where its models are, and so their
        names.
        """
        self._socket = socket
        self._say = say
        self._server_pid = server_pid
        self._models = models
        self._known: set[int] = set()

    def __call__(self) -> None:
        answer = ask(self._socket)
        if answer is None:
            return
        new = [r for r in answer.runners if r.pid not in self._known and self._ours(r.pid)]
        names = first_names(models_dirs(self._models)) if new else {}
        for report in new:
            model = shown(report.model, names)
            refused = [t for t in answer.model_terms if report.namespace in t.namespaces]
            if report.tiered and refused and refused[0].refusal:
                how = f"is not stored: {refused[0].refusal}"
            else:
                how = "is tiered" if report.tiered else f"is not tiered: {report.reason}"
            exact = report.cpu_attention.startswith("exact")
            attention = f", attention {report.cpu_attention}" if exact else ""
            self._say(f"model {model} loaded, {how}{attention}")
        self._known = {report.pid for report in answer.runners}

    def _ours(self, pid: int) -> bool:
        try:
            return psutil.Process(pid).ppid() == self._server_pid()
        except psutil.Error:  # it has ended
            return False
