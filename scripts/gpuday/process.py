"""One step in a process of its own: its time limit ends it, and a fault of a driver ends nothing
else. It reads the day and the state from the work folder, and writes its outcome there.

The process that starts it needs Python's standard library alone; the step finds what was unpacked.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

from ollama_tiering.errors import TieringError
from ollama_tiering.launch import leash
from scripts.gpuday.day import PACK_CURE, ROOT, Day
from scripts.gpuday.steps import FAILED, LACKING, TIMEOUT, Outcome, State, Step

STATE = "state.json"
GRACE_S = 20.0  # from SIGTERM to SIGKILL: servers are stopped, pinned memory is given back
MODULE = "scripts.gpuday.process"


def do(name: str, day: Day, state: State) -> Outcome:
    """The step's work. Errors that a person can act on are its outcome; others are a bug."""
    figures = {step: one.figures for step, one in state.outcomes.items()}
    from scripts.gpuday import measuring, preparing

    if name in preparing.STEPS:
        return preparing.STEPS[name](day, figures)
    kernel_steps: dict[str, Callable[[], Outcome]] = {
        "rates": lambda: measuring.rates(day.out / "rates.jsonl"),
        "kernels": lambda: measuring.kernels(day.out / "kernels.jsonl"),
        "suite": measuring.suite,
        "sanitizer": lambda: measuring.sanitizer(figures["look"]["tools"]),
    }
    if name in kernel_steps:
        return kernel_steps[name]()
    from scripts.gpuday import asking

    asker = asking.Asker(day.installed, day.work, asking.small() if day.small else asking.real())
    reference = figures.get("stock", {}).get("digest", "")
    return {
        "stock": lambda: asking.stock(asker),
        "sequential": lambda: asking.sequential(asker, reference),
        "prefetch": lambda: asking.prefetch(
            asker,
            reference,
            figures.get("sequential", {}).get("tokens_per_second", {}),
            figures.get("rates", {}).get(measuring.PINNED),
        ),
        "planner": lambda: asking.planner(asker, reference),
        "tiering": lambda: asking.tiering(asker),
        "graphs": lambda: asking.graphs(asker, reference),
    }[name]()


def step_process(name: str, work: Path) -> int:
    """What `launch` starts."""
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    day = Day.read(work)
    try:
        outcome = do(name, day, State.read(work / STATE))
    except ImportError as error:
        outcome = Outcome(LACKING, why=f"this Python lacks {error.name}", cure=PACK_CURE)
    except TieringError as error:
        outcome = Outcome(FAILED, why=str(error), cure=error.hint or "")
    (work / f"{name}.json").write_text(json.dumps(outcome.as_json()), encoding="utf-8")
    return 0


def launch(day: Day, step: Step, limit_s: float) -> Outcome:
    """Runs the step as a process, ended with all that it started when its time is over."""
    result, log = day.work / f"{step.name}.json", day.work / f"{step.name}.log"
    result.unlink(missing_ok=True)
    # leashed: if this process is killed, the step ends too, and does not hold the GPU
    command = [sys.executable, "-IS", leash.__file__, sys.executable, "-m", MODULE]
    command += [step.name, str(day.work)]
    paths = [str(ROOT), str(day.work / "site"), os.environ.get("PYTHONPATH", "")]
    env = os.environ | {"PYTHONPATH": os.pathsep.join(filter(None, paths)), "PYTHONUNBUFFERED": "1"}
    env["OLLAMA_TIERING_CACHE"] = str(day.work / "cache")
    # CMake and others of a Python's own folder
    env["PATH"] = os.pathsep.join([env.get("PATH", ""), str(Path(sys.executable).parent)])
    started = time.monotonic()
    with log.open("wb") as sink:
        process = subprocess.Popen(
            command,
            cwd=ROOT,
            env=env,
            stdin=subprocess.DEVNULL,
            stdout=sink,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
        try:
            in_time = _ended(process, limit_s)
        except BaseException:
            _end(process)
            raise
        if not in_time:
            _end(process)
    outcome = _outcome(result, log, in_time, process.returncode, limit_s)
    outcome.seconds = round(time.monotonic() - started, 1)
    return outcome


def _ended(process: subprocess.Popen[bytes], seconds: float) -> bool:
    with contextlib.suppress(subprocess.TimeoutExpired):
        process.wait(max(seconds, 0.1))
    return process.poll() is not None


def _end(process: subprocess.Popen[bytes]) -> None:
    process.terminate()
    if not _ended(process, GRACE_S):
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()


def _outcome(result: Path, log: Path, in_time: bool, code: int, limit_s: float) -> Outcome:
    last = [line for line in log.read_text(errors="replace").splitlines() if line.strip()][-12:]
    lines = ["```text", *last, "```"]
    if not in_time:
        return Outcome(TIMEOUT, lines, why=f"not ended within {limit_s:.0f} s")
    try:
        return Outcome.of_json(json.loads(result.read_text(encoding="utf-8")))
    except (OSError, ValueError, TypeError):
        return Outcome(FAILED, lines, why=f"exit code {code}: {last[-1] if last else 'no word'}")


if __name__ == "__main__":
    sys.exit(step_process(sys.argv[1], Path(sys.argv[2])))
