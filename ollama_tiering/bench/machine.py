"""The machine, the time and the code with which a number was measured."""

from __future__ import annotations

import datetime
import os
import platform
from dataclasses import asdict, dataclass
from pathlib import Path

import psutil

from ollama_tiering import __version__
from ollama_tiering.config import format_size
from ollama_tiering.patchset.own_commit import CHECKOUT, commit_of

RECORDS = "docs/measurements"


@dataclass(frozen=True, slots=True)
class Machine:
    cpu: str
    cores: int
    memory: str
    system: str
    date: str
    code: str
    load_at_start: float  # runnable processes, the mean of a minute; cores of them keep it busy
    load_at_end: float

    def as_json(self) -> dict[str, str | int | float]:
        return asdict(self)

    @property
    def load(self) -> str:
        return f"{self.load_at_start:.1f} at the start, {self.load_at_end:.1f} at the end"

    def lines(self, engine: str = "") -> list[str]:
        """The first lines of every record."""
        by = f", {engine}" if engine else ""
        return [
            f"- Machine: {self}",
            f"- Load average of 1 minute: {self.load} (the measurement itself is in the latter); "
            f"{self.cores} cores",
            f"- Measured: {self.date}, commit {self.code}{by}",
        ]

    def __str__(self) -> str:
        return f"{self.cpu}, {self.cores} cores, {self.memory}, {self.system}"


@dataclass(frozen=True, slots=True)
class Beginning:
    """What must be noted before a measurement, which may take long."""

    load: float
    code: str


def begin() -> Beginning:
    return Beginning(load_average(), _code(CHECKOUT))


def load_average() -> float:
    """The load average of the last minute."""
    return os.getloadavg()[0]


def this_machine(began: Beginning) -> Machine:
    """Describes it; call this when the measurement has ended."""
    code = _code(CHECKOUT)
    return Machine(
        cpu=_cpu(),
        cores=psutil.cpu_count() or 1,
        memory=format_size(psutil.virtual_memory().total),
        system=f"{platform.system()} {platform.release()}",
        date=datetime.datetime.now(datetime.UTC).strftime("%Y-%m-%d"),
        code=began.code if code == began.code else f"{began.code} and then {code}",
        load_at_start=began.load,
        load_at_end=load_average(),
    )


def _cpu() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    except OSError:
        return platform.processor() or platform.machine()
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.machine()


def _code(root: Path) -> str:
    """Commit of the checkout that this runs from, else the version. Records do not count as changes
    of the tree, so the first record of a series does not mark the second one's tree as changed.
    """
    return commit_of(root, RECORDS) or __version__
