"""Measures a newcomer's first quarter of an hour, on a fresh clone with empty caches.

First `--help` (installs the core packages), `demo --engine reference`, `patch` (fetches, builds),
`up` until it is ready, `demo`; each once more with everything cached. Seconds, processor seconds,
disk. The machine should be idle; the network, or --source and pip's cache, decides a part of it.

    python -m measure.first_run [--source CLONE] [--out FILE.md]
"""

from __future__ import annotations

import os
import resource
import signal
import subprocess
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path

from measure.running import arguments, publish
from ollama_tiering.bench.machine import begin
from ollama_tiering.bench.table import Table
from ollama_tiering.launch.address import free_address

REPO = Path(__file__).resolve().parent.parent
_OURS = ("OLLAMA_", "XDG_", "GO", "PYTHON")  # of whoever measures; the clone has its own


@dataclass(frozen=True)
class Step:
    name: str
    seconds: float
    cpu_seconds: float
    disk_bytes: int  # of the clone's .venv and the caches, after it
    bound: str = ""

    def row(self) -> tuple[str, ...]:
        disk = f"{self.disk_bytes / 2**20:,.0f} MiB"
        return self.name, f"{self.seconds:.1f}", f"{self.cpu_seconds:.1f}", disk, self.bound


class FirstRun:
    """A clone in an empty home; nothing of the person's caches is seen but pip's."""

    def __init__(self, root: Path) -> None:
        self.clone, self.home = root / "clone", root / "home"
        self.home.mkdir()
        (self.home / "run").mkdir(mode=0o700)
        own = {n: v for n, v in os.environ.items() if not n.startswith(_OURS)}
        pip_cache = os.environ.get("PIP_CACHE_DIR", str(Path.home() / ".cache/pip"))
        self.env = own | {
            "HOME": str(self.home),
            "XDG_RUNTIME_DIR": str(self.home / "run"),
            "PIP_CACHE_DIR": pip_cache,
        }
        command = ["git", "clone", "--quiet", str(REPO), str(self.clone)]
        subprocess.run(command, check=True)

    def step(self, name: str, *args: str, bound: str = "") -> Step:
        """One command to its end; it must succeed."""
        started, before = time.monotonic(), _cpu_seconds()
        command = [str(self.clone / "scripts/tiering"), *args]
        subprocess.run(command, env=self.env, stdout=subprocess.DEVNULL, check=True)
        seconds = time.monotonic() - started
        return Step(name, seconds, _cpu_seconds() - before, self.disk_bytes(), bound)

    def up(self, name: str, bound: str) -> Step:
        """`up` until it says that it is ready; then it is stopped, untimed."""
        started, before = time.monotonic(), _cpu_seconds()
        process = subprocess.Popen(
            [self.clone / "scripts/tiering", "up", "--host", str(free_address())],
            env=self.env,
            stdout=subprocess.PIPE,
            text=True,
        )
        try:
            assert process.stdout
            if not any(line.startswith("ready:") for line in process.stdout):
                raise SystemExit(f"{name}: it ended before it was ready")
            seconds = time.monotonic() - started
        finally:
            process.send_signal(signal.SIGINT)
            process.communicate()
        return Step(name, seconds, _cpu_seconds() - before, self.disk_bytes(), bound)

    def disk_bytes(self) -> int:
        places = (self.clone / ".venv", self.home)
        return sum(p.lstat().st_blocks * 512 for place in places for p in place.rglob("*"))


def _cpu_seconds() -> float:
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime


def measure(root: Path, source: str | None) -> list[Step]:
    run = FirstRun(root)
    named = ("--source", source) if source else ()
    reference = ("demo", "--engine", "reference")
    return [
        run.step("`--help`", "--help", bound="disk: 100 MiB"),
        run.step("`--help` again", "--help", bound="10 s"),
        run.step("`demo --engine reference`", *reference, bound="60 s with the first `--help`"),
        run.step("`demo --engine reference` again", *reference),
        run.step("`fetch`", "fetch", *named),
        run.step("`patch` (what `up` builds)", "patch", bound="240 s on 2 idle cores"),
        run.step("`patch` again", "patch", bound="10 s"),
        run.up("`up`, built already, until ready", bound="10 s"),
        run.step("`demo`", "demo"),
    ]


def main() -> None:
    parser = arguments(__doc__)
    parser.add_argument("--source", help="URL or local clone of Ollama; default: the network")
    given = parser.parse_args()
    began = begin()
    with tempfile.TemporaryDirectory(prefix="first-") as root:
        steps = measure(Path(root), given.source)
    title = "The first quarter of an hour"
    table = Table(
        title,
        ("step", "seconds", "processor seconds", "disk after it", "bound"),
        [step.row() for step in steps],
        [
            "A fresh clone with an empty home; pip may take packages from its cache.",
            "Disk: `.venv` and everything below the home directory, as allocated.",
        ],
    )
    publish("first_run", title, began, "first run", ["", *table.lines()], given.out)


if __name__ == "__main__":
    main()
