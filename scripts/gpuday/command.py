"""scripts/gpu_day: what to do with a machine that has an NVIDIA GPU, for the minutes it is lent."""

from __future__ import annotations

import argparse
import sys
import tarfile
import time
from collections.abc import Sequence
from pathlib import Path

from scripts.gpuday import report, steps
from scripts.gpuday.steps import (
    ABOUT,
    BEGUN,
    LACKING,
    LLAMA_SERVER,
    NEITHER,
    OLLAMA,
    PACK,
    Day,
    Outcome,
    Step,
)

REPORT, LOG = "report.md", "steps.log"
MOST_LOG_BYTES = 1 << 20  # of a step, in what comes back

_OLLAMA, _CSRC = ("library", "model"), ("csrc",)
# In the order of their worth, if not all can be done: what every owner of a card has first, then
# paging, then the kernels. Steps of one group run at the same time.
GROUPS = (
    (Step("look", "machine", "what is there", 60, 5),),
    (Step("library", "machine", "libggml-cuda that came, with NVIDIA's", 60, 10, ("look",)),),
    (
        Step("engines", "engines", "three engines: `tests/engine_gpu`", 240, 60, ("library",)),
        Step("model", "asking", "a model of a real shape, random weights", 300, 60, ("look",)),
        Step("csrc", "kernels", "csrc's launcher, compiled", 300, 60, ("look",)),
    ),
    (Step("rates", "kernels", "what bus and memory give", 120, 30, _CSRC),),
    (Step("restore", "restoring", "restored into VRAM", 240, 60, _OLLAMA),),
    (Step("llama_server", "engines", "llama-server: seven ways to go on", 240, 60, _OLLAMA),),
    (Step("stock", "asking", "stock's library: the reference", 120, 30, _OLLAMA),),
    (Step("sequential", "asking", "paged, each layer copied in its turn", 240, 45, ("stock",)),),
    (Step("prefetch", "asking", "paged, copied ahead", 240, 45, ("stock",)),),
    (Step("planner", "asking", "a long context in little room", 240, 45, ("stock",)),),
    (Step("tiering", "restoring", "restored into hot and pinned layers", 240, 45, _OLLAMA),),
    (Step("graphs", "asking", "CUDA graphs, nothing paged", 300, 60, ("stock",)),),
    (Step("gate", "restoring", "what the gate chooses", 120, 30, _OLLAMA),),
    (Step("suite", "kernels", "csrc's kernels: tests/attention/gpu", 200, 60, _CSRC),),
    (Step("kernels", "kernels", "csrc's kernels: `tiering kernel report`", 300, 60, _CSRC),),
    (Step("sanitizer", "kernels", "csrc's kernels: compute-sanitizer", 120, 40, _CSRC),),
)  # fmt: skip
STEPS = [step for group in GROUPS for step in group]


def wanted(names: Sequence[str]) -> set[str]:
    """These steps and what they need; all, if none is named."""
    found: set[str] = set()
    left = list(names) or [step.name for step in STEPS]
    while left:
        name = left.pop()
        found.add(name)
        left += next(step for step in STEPS if step.name == name).needs
    return found


def run(day: Day, minutes: float, only: Sequence[str] = ()) -> int:
    """`gpu_day run`: exit code 0 if every step is done, 1 if one is not."""
    chosen = wanted(only)
    groups = [[step for step in group if step.name in chosen] for group in GROUPS]
    deadline = time.monotonic() + 60 * minutes - steps.GRACE_S
    if (day.work / steps.STATE).exists():
        day.outcomes = Day.read(day.work).outcomes
    if PACK.is_file() and not (day.work / ABOUT).exists():
        with tarfile.open(PACK) as archive:
            archive.extractall(day.work, filter="data")

    def written() -> None:
        day.write()
        (day.out / REPORT).write_text(report.text(day, STEPS), encoding="utf-8")

    def launch(step: Step, limit_s: float) -> Outcome:
        print(f"* {step.name}: {step.title}", flush=True)
        outcome = steps.launch(day, step, limit_s)
        why = f": {outcome.why}" if outcome.why else ""
        print(f"  {step.name}: {outcome.status}{why} ({outcome.seconds:.0f} s)", flush=True)
        said = (day.work / f"{step.name}.log").read_bytes()[-MOST_LOG_BYTES:]
        with (day.out / LOG).open("ab") as log:  # few files come back: all logs are in one
            log.write(f"\n===== {step.name}\n".encode() + said)
        return outcome

    steps.run(day, groups, launch, lambda: deadline - time.monotonic(), written)
    for name, outcome in day.outcomes.items():
        if outcome.status == LACKING:
            print(f"{name}: not possible: {outcome.why}; cure: {outcome.cure or 'none'}")
    if late := [name for name in map(_name, STEPS) if name in chosen and name not in day.outcomes]:
        print(f"not begun, the time was over: {', '.join(late)}; the same command goes on")
    print(f"report: {day.out / REPORT}")
    return 0 if all(map(day.is_done, chosen)) else 1


def merged(states: Sequence[Path]) -> str:
    """A report of several runs: of a step that is in more than one, the last that ended counts."""
    days = [Day.read(state.parent) for state in states]
    for day in days[1:]:
        days[0].outcomes |= {n: one for n, one in day.outcomes.items() if one.status != BEGUN}
    return report.text(days[0], STEPS)


def _name(step: Step) -> str:
    return step.name


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser("scripts/gpu_day", description=__doc__)
    commands = parser.add_subparsers(dest="command", required=True)
    packing = commands.add_parser("pack", help="make what has to travel")
    packing.add_argument(
        "--engine",
        choices=[OLLAMA, LLAMA_SERVER, NEITHER],
        help="for this one only, or for the kernels alone; else for both",
    )
    running = commands.add_parser("run", help="do the steps, or go on with them")
    running.add_argument("--out", type=Path, default=PACK.parent / "out", help="report and state")
    running.add_argument("--work", type=Path, default=PACK.parent / "work", help="gigabytes")
    running.add_argument("--minutes", type=float, default=9.5, help="end before so many are over")
    running.add_argument("--only", default="", help="these steps and what they need: a,b")
    running.add_argument(
        "--stand-in", type=Path, help="an installed Ollama whose library simulates a GPU: to try it"
    )
    merging = commands.add_parser("report", help="one report of several runs' state.json")
    merging.add_argument("states", nargs="+", type=Path)
    given = parser.parse_args(arguments)
    if given.command == "report":
        print(merged(given.states), end="")
        return 0
    if given.command == "pack":
        from scripts.gpuday import pack  # where it is packed, all that it imports is at hand

        engines = {None: pack.BOTH, NEITHER: ()}.get(given.engine, (given.engine,))
        pack.make(engines)
        return 0
    stand_in = given.stand_in.absolute() if given.stand_in else None
    day = Day(given.out.absolute(), given.work.absolute(), stand_in)
    only = [name for name in given.only.split(",") if name]
    if unknown := set(only) - set(map(_name, STEPS)):
        parser.error(f"no such step: {', '.join(sorted(unknown))}")
    return run(day, given.minutes, only)


if __name__ == "__main__":
    sys.exit(main())
