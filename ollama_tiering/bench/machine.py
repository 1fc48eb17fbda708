"""On what, when and with which code a number was measured."""

from __future__ import annotations

import datetime
import platform
from dataclasses import asdict, dataclass
from pathlib import Path

import psutil

from ollama_tiering import __version__
from ollama_tiering.config import format_size
from ollama_tiering.errors import MissingTool
from ollama_tiering.patchset.run import run


@dataclass(frozen=True, slots=True)
class Machine:
    cpu: str
    cores: int
    memory: str
    system: str
    date: str
    code: str

    def as_json(self) -> dict[str, str | int]:
        return asdict(self)

    def __str__(self) -> str:
        return f"{self.cpu}, {self.cores} cores, {self.memory}, {self.system}"


def this_machine() -> Machine:
    return Machine(
        cpu=_cpu(),
        cores=psutil.cpu_count() or 1,
        memory=format_size(psutil.virtual_memory().total),
        system=f"{platform.system()} {platform.release()}",
        date=datetime.datetime.now(datetime.UTC).strftime("%Y-%m-%d"),
        code=_code(),
    )


def _cpu() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    except OSError:
        return platform.processor() or platform.machine()
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.machine()


def _code() -> str:
    """Commit of the checkout this runs from, else the version."""
    root = Path(__file__).parents[2]
    try:
        commit = run("git", "rev-parse", "--short", "HEAD", cwd=root)
        changed = run("git", "status", "--porcelain", "--untracked-files=no", cwd=root)
    except MissingTool:
        return __version__
    if commit.returncode or not (root / "patches").is_dir():
        return __version__
    return commit.stdout.strip() + (" with changes" if changed.stdout.strip() else "")
