"""The file that a running server has loaded is found by its command line."""

from __future__ import annotations

import subprocess
import time
from pathlib import Path

from ollama_tiering.launch.loaded_model import model_files


def test_the_file_is_named_by_the_command_from_the_directory_it_runs_in(tmp_path: Path) -> None:
    command = ["sh", "-c", "read line", "llama-server", "-m", "sub/model.gguf", "-c", "4096"]
    with subprocess.Popen(command, cwd=tmp_path, stdin=subprocess.PIPE) as server:
        deadline = time.monotonic() + 30
        while not (found := model_files([server.pid, 1 << 22, -5])):  # its words come with exec
            assert time.monotonic() < deadline
        assert server.stdin is not None
        server.stdin.close()
    assert found == {"model.gguf": tmp_path / "sub" / "model.gguf"}


def test_who_names_no_model_has_none() -> None:
    assert model_files([1 << 22]) == {}
