"""A sidecar for the measurement: a process of its own, on directories of its own, ended with it."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Final

_END_SECONDS: Final = 60.0


@contextlib.contextmanager
def sidecar(
    options: Sequence[str], settings: str = ""
) -> Iterator[tuple[float, subprocess.Popen[str], str]]:
    """(seconds until it is ready, the process, its socket). `settings` are lines of [sidecar]; the
    user's own settings do not count, nor is anything noted in their state directory.
    """
    with tempfile.TemporaryDirectory() as run:
        socket = f"{run}/s"
        config = Path(run) / "ollama-tiering" / "config.toml"
        config.parent.mkdir()
        config.write_text(f"[sidecar]\n{settings}\n")
        command = [sys.executable, "-m", "ollama_tiering", "sidecar", "--log-level", "warning"]
        command += ["--socket", socket, *options]
        begin = time.perf_counter()
        process = subprocess.Popen(
            command,
            stdout=subprocess.PIPE,
            text=True,
            env={**os.environ, "XDG_CONFIG_HOME": run, "XDG_STATE_HOME": run},
        )
        try:
            line = process.stdout.readline() if process.stdout is not None else ""
            seconds = time.perf_counter() - begin
            if "ready" not in line:
                raise RuntimeError(f"the sidecar did not start: {line.strip()}")
            yield seconds, process, socket
        finally:
            process.send_signal(signal.SIGTERM)
            process.communicate(timeout=_END_SECONDS)
