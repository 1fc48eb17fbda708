"""The llama-server of a self-test does not outlive who started it."""

from __future__ import annotations

import signal
import subprocess
import sys
import time
from pathlib import Path

import psutil

STARTS = """\
import sys, time
from pathlib import Path
from ollama_tiering.launch import llama_server
llama_server.LlamaServer.ready = lambda self: True
folder = Path(sys.argv[1])
with llama_server.serving(folder / "server", folder / "model", folder / "log", {}) as server:
    print(server._child.pid, flush=True)
    time.sleep(60)
"""


def test_it_ends_with_a_process_that_is_killed(tmp_path: Path) -> None:
    (tmp_path / "server").write_text("#!/bin/sh\nexec sleep 60\n")
    (tmp_path / "server").chmod(0o755)
    with subprocess.Popen(
        [sys.executable, "-c", STARTS, str(tmp_path)], stdout=subprocess.PIPE, text=True
    ) as process:
        assert process.stdout is not None
        server = psutil.Process(int(process.stdout.readline()))
        try:
            while server.name() != "sleep":  # the leash is on before it is
                time.sleep(0.05)
            process.send_signal(signal.SIGKILL)
            server.wait(20)
        finally:
            if server.is_running():
                server.kill()
