"""A sidecar in a process of its own whose every touch of the file system is written down."""

from __future__ import annotations

import ast
import os
import site
import sys
import sysconfig
from pathlib import Path
from typing import Any

from ollama_tiering.config.places import APP_NAME
from ollama_tiering.sidecar.ledger_file import FILE_NAME
from tests.sidecar import SidecarProcess

# What an interpreter and its libraries read wherever they run.
SYSTEM = ("/proc", "/sys", "/usr", "/lib", "/lib64", "/etc", "/dev/null", "/dev/urandom")
# Anonymous: what a descriptor leads to that has no name.
NAMELESS = ("pipe:", "socket:", "anon_inode:", "/memfd:")


class WatchedSidecar(SidecarProcess):
    def __init__(self, root: Path, **options: Any) -> None:
        super().__init__(root, **options)
        self.touched_path = root / "touched"

    def command(self) -> list[str]:
        script = Path(__file__).with_name("watch.py")
        command = super().command()
        assert command[1:3] == ["-m", "ollama_tiering"]
        return [sys.executable, str(script), str(self.touched_path), *command[3:]]

    def touched(self) -> list[tuple[str, str]]:
        """(event, absolute path) of everything so far."""
        lines = self.touched_path.read_text().splitlines()
        return [(event, ast.literal_eval(place)) for event, _, place in map(_parts, lines)]

    def outside(self) -> list[tuple[str, str]]:
        """What was touched that is neither a tier nor needed to run at all."""
        own = [self.ram_dir, self.local_dir, self.socket.parent, self.root / "config"]
        code = [sys.prefix, sys.base_prefix, *sys.path, *site.getsitepackages()]
        code += [sysconfig.get_paths()["stdlib"], os.path.realpath(sys.executable)]
        inside = [str(path) for path in (*own, *filter(None, code), *SYSTEM)]
        # A new tier's own name is synced in the directory it is in; nothing else there is touched.
        synced = {(e, str(one.parent)) for e in ("open", "opened") for one in own[:2]}
        state = self.root / "state" / APP_NAME
        names = (
            FILE_NAME,
            "stores.json",
            "contents.json",
            "adopted.json",
            "rechecks.json",
        )  # each with its lock, and a new one
        kept = tuple(f"{state}/{dot}{name}" for name in names for dot in ("", "."))
        made = (str(state.parent), str(state))
        return [
            (event, place)
            for event, place in self.touched()
            if not place.startswith((*NAMELESS, *kept))
            and (event, place) not in synced
            and place not in made
            and not any(place == top or place.startswith(f"{top}/") for top in inside)
        ]

    def peak_bytes(self) -> int:
        """The most memory it ever had in RAM."""
        assert self.process is not None
        status = Path(f"/proc/{self.process.pid}/status").read_text()
        (line,) = (line for line in status.splitlines() if line.startswith("VmHWM"))
        return int(line.split()[1]) << 10


def _parts(line: str) -> tuple[str, str, str]:
    return line.partition("\t")
