"""An `ollama.service` as systemd would have it, drop-ins and all, and one start of it."""

from __future__ import annotations

import os
import shlex
import subprocess
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from tests.unit.systemd import fake_tree

NAME = "ollama.service"


@dataclass
class Start:
    program: Path
    same_process: bool
    environment: dict[str, str]
    said: str


@dataclass
class OllamaService:
    """Of one folder of units: the file, then the drop-ins by their names."""

    folder: Path

    @property
    def drop_ins(self) -> list[Path]:
        return sorted((self.folder / f"{NAME}.d").glob("*.conf"))

    def values(self, key: str) -> list[str]:
        """Since the last empty one, which takes back what comes before."""
        found: list[str] = []
        for file in (self.folder / NAME, *self.drop_ins):
            for line in file.read_text().splitlines():
                name, _, value = line.partition("=")
                if name == key:
                    found = [*found, value] if value else []
        return found

    def command(self) -> list[str]:
        (line,) = self.values("ExecStart")
        return [w.replace("$$", "$").replace("%%", "%") for w in shlex.split(line)]

    def environment(self) -> dict[str, str]:
        words = [word for line in self.values("Environment") for word in shlex.split(line)]
        return dict(word.partition("=")[::2] for word in words)

    def start(self, change: Callable[[str], str] = str, **more: str) -> Start:
        """`change` is made to each word. The program says how it was started (fake_tree)."""
        seen = self.folder / "seen"
        seen.unlink(missing_ok=True)
        env = {"PATH": os.environ["PATH"], "HOME": str(self.folder), fake_tree.SEEN: str(seen)}
        process = subprocess.Popen(
            [change(word) for word in self.command()],
            env=env | self.environment() | more,
            stderr=subprocess.PIPE,
            text=True,
            cwd="/",
        )
        _, said = process.communicate(timeout=90)
        assert process.returncode == 0, said
        program, pid, *rest = seen.read_text().splitlines()
        variables = dict(line.partition("=")[::2] for line in rest)
        return Start(Path(program), int(pid) == process.pid, variables, said)
