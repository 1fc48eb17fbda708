"""Steps of scripts/gpu_day: what one is, what came of it, and how they are run.

Each is a process of its own: its time limit ends it with all that it started, and a fault of a
driver ends nothing else. None is begun whose time cannot be had. What is known is written before
and after each, so a command that is killed loses one step. Standard library only, as long as a step
is not begun: this has to start where nothing of ours is installed.
"""

from __future__ import annotations

import importlib
import json
import os
import signal
import sys
import time
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from ollama_tiering.errors import MissingTool, TieringError
from ollama_tiering.launch.process import POLL_SECONDS, start
from ollama_tiering.system.durable_file import replace_file

ROOT = Path(__file__).resolve().parents[2]
PACK = ROOT / "build/gpu_day/pack.tar.xz"
OLLAMA, LLAMA_SERVER, NEITHER = "ollama", "llama-server", "none"  # for which it is made
# In it, and in the work folder.
PROGRAM, SITE, ABOUT = "program", "site", "pack.json"
CUDA_OLLAMA, CUDA_LLAMA_CPP = "cuda/ollama", "cuda/llama.cpp"
SERVER, STOCK_SERVER = "build/bin/llama-server", "stock/llama-server"  # below llama-server/
PACK_CURE = f"`scripts/gpu_day pack` where there is a network; carry {PACK.relative_to(ROOT)}"
DONE, FAILED, LACKING, TIMEOUT, BEGUN = "done", "failed", "lacking", "timeout", "begun"
STATE = "state.json"
GRACE_S = 20.0  # from SIGTERM to SIGKILL: servers are stopped, pinned memory is given back
PROCESS = (sys.executable, "-m", "scripts.gpuday.steps")
LAST_LINES = 12


@dataclass(slots=True)
class Outcome:
    """What came of a step. `lines` are its part of the report, `figures` are for later steps, and
    `bounds` what was measured of report.BOUNDS; None is not measured.
    """

    status: str
    lines: list[str] = field(default_factory=list)
    figures: dict[str, Any] = field(default_factory=dict)
    bounds: dict[str, float | None] = field(default_factory=dict)
    why: str = ""  # it failed, or what it lacks
    cure: str = ""
    seconds: float = 0.0


@dataclass(frozen=True, slots=True)
class Step:
    """A function of this name in a module beside this one. Without `needs` it says nothing."""

    name: str
    module: str
    title: str
    limit_s: float
    least_s: float  # it is not begun if less is left
    needs: tuple[str, ...] = ()


@dataclass(slots=True)
class Day:
    """What the command was told, and what came of its steps so far. `stand_in`: an installed Ollama
    whose library simulates a GPU.
    """

    out: Path
    work: Path
    stand_in: Path | None = None
    outcomes: dict[str, Outcome] = field(default_factory=dict)

    @property
    def program(self) -> Path:
        """The Ollama that is asked."""
        return self.stand_in or self.work / "ollama/bin/ollama"

    def is_done(self, name: str) -> bool:
        return name in self.outcomes and self.outcomes[name].status == DONE

    def figures(self, name: str) -> dict[str, Any]:
        return self.outcomes[name].figures if name in self.outcomes else {}

    def write(self) -> None:
        text = json.dumps(asdict(self), indent=1, default=str)
        for folder in (self.work, self.out):
            folder.mkdir(parents=True, exist_ok=True)
            replace_file(folder / STATE, text)

    @classmethod
    def read(cls, work: Path) -> Day:
        told = json.loads((work / STATE).read_text(encoding="utf-8"))
        outcomes = {name: Outcome(**one) for name, one in told["outcomes"].items()}
        stand_in = Path(told["stand_in"]) if told["stand_in"] else None
        return cls(Path(told["out"]), work, stand_in, outcomes)


def run(
    day: Day,
    groups: Iterable[Sequence[Step]],
    launch: Callable[[Step, float], Outcome],
    seconds_left: Callable[[], float],
    written: Callable[[], None],
) -> None:
    """Runs what has no result yet: the groups in order, the steps of a group at the same time, each
    with its limit in seconds.
    """
    for group in groups:
        ready = []
        for step in group:
            old = day.outcomes.get(step.name)
            if old and old.status != BEGUN:
                continue
            lacks = next((name for name in step.needs if not day.is_done(name)), None)
            if lacks in day.outcomes:
                other = day.outcomes[lacks]
                why = other.why or f"the step `{lacks}` is not done"
                day.outcomes[step.name] = Outcome(LACKING, why=why, cure=other.cure)
            elif not lacks and seconds_left() >= step.least_s:
                day.outcomes[step.name] = Outcome(BEGUN)
                ready.append(step)
        written()
        limits = [min(step.limit_s, seconds_left()) for step in ready]
        with ThreadPoolExecutor() as pool:
            for step, outcome in zip(ready, pool.map(launch, ready, limits), strict=True):
                day.outcomes[step.name] = outcome
                written()


def launch(day: Day, step: Step, limit_s: float, program: Sequence[str] = PROCESS) -> Outcome:
    """Runs the step as a process, which ends with this one, and does not hold the GPU."""
    result, log = day.work / f"{step.name}.json", day.work / f"{step.name}.log"
    for old in (result, log):
        old.unlink(missing_ok=True)
    paths = [str(ROOT), str(day.work / SITE), os.environ.get("PYTHONPATH", "")]
    env = {
        "PYTHONPATH": os.pathsep.join(filter(None, paths)),
        "PYTHONUNBUFFERED": "1",
        "OLLAMA_TIERING_CACHE": str(day.work / "cache"),
        # CMake and others of a Python's own folder
        "PATH": os.pathsep.join([os.environ.get("PATH", ""), str(Path(sys.executable).parent)]),
    }
    words = (*program, step.module, step.name, str(day.work))
    begun = time.monotonic()
    child = start(step.name, *words, log=log, env=env, cwd=ROOT, leashed=True)
    try:
        while child.running and time.monotonic() < begun + limit_s:
            time.sleep(POLL_SECONDS)
        in_time = not child.running
    finally:
        child.stop(seconds=GRACE_S)
    said = [line for line in log.read_text(errors="replace").splitlines() if line.strip()]
    if in_time and result.exists():
        outcome = Outcome(**json.loads(result.read_text(encoding="utf-8")))
    else:
        outcome = Outcome(FAILED, ["```text", *said[-LAST_LINES:], "```"])
        outcome.why = f"exit code {child.exit_code}: {said[-1] if said else 'no word'}"
    if not in_time:
        outcome.status, outcome.why = TIMEOUT, f"not ended within {limit_s:.0f} s"
    outcome.seconds = round(time.monotonic() - begun, 1)
    return outcome


def main(module: str, name: str, work: Path) -> None:
    """Does a step. Errors that a person can act on are its outcome; others are a bug."""
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    try:
        step = getattr(importlib.import_module(f"scripts.gpuday.{module}"), name)
        outcome = step(Day.read(work))
    except ImportError as error:
        outcome = Outcome(LACKING, why=f"this Python lacks {error.name}", cure=PACK_CURE)
    except TieringError as error:
        status = LACKING if isinstance(error, MissingTool) else FAILED
        outcome = Outcome(status, why=error.message, cure=error.hint or "")
    replace_file(work / f"{name}.json", json.dumps(asdict(outcome)))


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2], Path(sys.argv[3]))
