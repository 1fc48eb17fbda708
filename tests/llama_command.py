"""`tiering llama-server` in a process of its own, in private directories."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
from pathlib import Path

import psutil

from ollama_tiering.launch import block_service

REPOSITORY = Path(__file__).parents[1]
STOP_SECONDS = 60.0


class LlamaCommand:
    """A context manager that ends what it started."""

    def __init__(self, root: Path, **env: str) -> None:
        (root / "run").mkdir(mode=0o700)
        left_out = ("OLLAMA_", "XDG_", "LLAMA_")
        own = {name: value for name, value in os.environ.items() if not name.startswith(left_out)}
        self.log = root / "log"
        self.env = own | {
            "HOME": str(root),
            "XDG_RUNTIME_DIR": str(root / "run"),
            "XDG_STATE_HOME": str(root / "state"),
            "XDG_DATA_HOME": str(root / "data"),
            "XDG_CACHE_HOME": str(root / "cache"),
            "XDG_CONFIG_HOME": str(root / "config"),
            "OLLAMA_KV_TIER_RAM": str(root / "ram"),
            "PYTHONPATH": str(REPOSITORY),
            **env,
        }
        self.socket = root / "run" / "ollama-tiering" / "sidecar.sock"
        self.started: list[subprocess.Popen[bytes]] = []

    def start(self, *arguments: str | Path) -> subprocess.Popen[bytes]:
        with self.log.open("ab") as output:
            process = subprocess.Popen(
                [sys.executable, "-m", "ollama_tiering", "llama-server", *map(str, arguments)],
                env=self.env,
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
            )
        self.started.append(process)
        return process

    def run(self, *arguments: str | Path) -> int:
        return self.start(*arguments).wait(STOP_SECONDS)

    def said(self) -> str:
        return self.log.read_text(errors="replace")

    def __enter__(self) -> LlamaCommand:
        return self

    def __exit__(self, *_: object) -> None:
        for process in self.started:
            if process.poll() is None:
                process.send_signal(signal.SIGTERM)
                process.wait(STOP_SECONDS)
        with contextlib.suppress(psutil.Error):  # one that was killed leaves its sidecar
            left = psutil.Process(block_service.owner(self.socket) or 0)
            if str(self.socket) in left.cmdline():
                left.terminate()
                left.wait(STOP_SECONDS)
