"""A machine below a directory: a stock Ollama, systemd's own units, a patched binary to install."""

from __future__ import annotations

import contextlib
import io
import json
import os
import pwd
import shutil
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from unittest import mock

import pytest

from ollama_tiering.cli import main

SYSTEM_UNITS = Path("/usr/lib/systemd/system")
STOCK_UNIT = """[Unit]
Description=Ollama Service
[Service]
ExecStart=/usr/local/bin/ollama serve
User=ollama
[Install]
WantedBy=default.target
"""

PASSWD = """root:x:0:0:root:/root:/bin/bash
ollama:x:998:998::/usr/share/ollama:/bin/false
somebody:x:1000:1000:Some Body,,,:/home/somebody:/bin/bash
"""


@dataclass
class Machine:
    root: Path
    build: Path

    def tiering(self, *args: str | Path, code: int = 0, **env: str) -> str:
        """Runs `tiering systemd ARGS --root …`; its output. Checks the exit code."""
        output, complaint = io.StringIO(), io.StringIO()
        with (
            mock.patch.dict(os.environ, self.environment() | env, clear=True),
            contextlib.redirect_stdout(output),
            contextlib.redirect_stderr(complaint),
            pytest.raises(SystemExit) as ended,
        ):
            main(["systemd", *map(str, args), "--root", str(self.root)])
        assert ended.value.code == code, (output.getvalue(), complaint.getvalue())
        return (complaint if code else output).getvalue()

    def document(self, *args: str | Path) -> dict[str, Any]:
        answer: dict[str, Any] = json.loads(self.tiering(*args, "--json"))
        return answer

    def install(self, *args: str | Path) -> str:
        return self.tiering("install", "--binary", self.binary, *args)

    @property
    def binary(self) -> Path:
        return self.build / "ollama"

    def environment(self) -> dict[str, str]:
        home = pwd.getpwuid(os.getuid()).pw_dir
        kept = {k: v for k, v in os.environ.items() if not k.startswith(("OLLAMA_", "XDG_"))}
        return kept | {"HOME": home}

    def at(self, path: str | Path) -> Path:
        return self.root / str(path).lstrip("/")

    def write(self, path: str, text: str, mode: int = 0o644) -> Path:
        target = self.at(path)
        target.parent.mkdir(parents=True, exist_ok=True)
        target.write_text(text)
        target.chmod(mode)
        return target

    def files(self) -> dict[str, str]:
        """Everything on it, with content."""
        found = {}
        for path in sorted(self.root.rglob("*")):
            name = str(path.relative_to(self.root))
            if path.is_symlink():
                found[name] = f"-> {path.readlink()}"
            else:
                found[name] = path.read_text() if path.is_file() else "directory"
        return found


@pytest.fixture
def machine(tmp_path: Path) -> Machine:
    made = Machine(tmp_path / "root", tmp_path / "src")
    made.write("/usr/local/bin/ollama", "stock binary", 0o755)
    made.write("/etc/systemd/system/ollama.service", STOCK_UNIT)
    made.write("/etc/systemd/system/ollama.service.d/override.conf", "[Service]\n")
    made.write("/etc/passwd", PASSWD)
    made.build.mkdir()
    made.binary.write_text("#!/bin/sh\nexit 0\n")
    made.binary.chmod(0o755)
    libraries = made.build / "build/lib/ollama"
    (libraries / "cuda_v12").mkdir(parents=True)
    (libraries / "libggml-base.so.0").write_text("library")
    (libraries / "libggml-base.so").symlink_to("libggml-base.so.0")
    (libraries / "cuda_v12/libggml-cuda.so").write_text("cuda")
    return made


@pytest.fixture
def systemd_machine(machine: Machine) -> Machine:
    """With the host's units, and something executable where the units point."""
    if shutil.which("systemd-analyze") is None or not SYSTEM_UNITS.is_dir():
        pytest.skip("systemd-analyze is not here")
    shutil.copytree(SYSTEM_UNITS, machine.at(SYSTEM_UNITS), symlinks=True)
    machine.write("/bin/kill", "", 0o755)
    machine.write(sys.executable, "", 0o755)
    return machine
