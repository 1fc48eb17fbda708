"""scripts/gpu_day: what to do with a machine that has an NVIDIA GPU, for the minutes it is lent."""

from __future__ import annotations

import argparse
import sys
import tarfile
import time
from collections.abc import Sequence
from pathlib import Path

from scripts.gpuday import report, steps
from scripts.gpuday.steps import ABOUT, LACKING, PACK, Day, Outcome, Step

REPORT, LOG = "report.md", "steps.log"
MOST_LOG_BYTES = 1 << 20  # of a step, in what comes back

_OLLAMA, _CSRC = ("library", "model"), ("csrc",)
# In the order of their worth, if not all can be done: paging first, then the kernels. Steps of one
# group run at the same time.
GROUPS = (
    (Step("look", "machine", "what is there", 60, 5),),
    (
        Step("library", "machine", "libggml-cuda for this GPU, the shim beside it", 500, 120,
             ("look",)),
        Step("model", "asking", "a model of a real shape, random weights", 400, 60, ("look",)),
        Step("csrc", "kernels", "csrc's launcher, compiled", 400, 60, ("look",)),
    ),
    (Step("rates", "kernels", "what bus and memory give", 120, 40, _CSRC),),
    (Step("stock", "asking", "stock's library: the reference", 120, 40, _OLLAMA),),
    (Step("sequential", "asking", "paged, each layer copied in its turn", 240, 60, ("stock",)),),
    (Step("prefetch", "asking", "paged, copied ahead", 240, 60, ("stock",)),),
    (Step("planner", "asking", "a long context in little room", 240, 60, ("stock",)),),
    (Step("tiering", "asking", "restored into hot and pinned layers", 240, 60, _OLLAMA),),
    (Step("graphs", "asking", "CUDA graphs, nothing paged", 300, 90, ("stock",)),),
    (Step("kernels", "kernels", "csrc's kernels: `tiering kernel report`", 500, 120, _CSRC),),
    (Step("suite", "kernels", "csrc's kernels: tests/attention/gpu", 300, 60, _CSRC),),
    (Step("sanitizer", "kernels", "csrc's kernels: compute-sanitizer", 120, 40, _CSRC),),
)  # fmt: skip
STEPS = [step for group in GROUPS for step in group]


def run(day: Day, minutes: float) -> int:
    """`gpu_day run`: exit code 0 if every step is done, 1 if one is not."""
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

    steps.run(day, GROUPS, launch, lambda: deadline - time.monotonic(), written)
    for name, outcome in day.outcomes.items():
        if outcome.status == LACKING:
            print(f"{name}: not possible: {outcome.why}; cure: {outcome.cure or 'none'}")
    if late := [step.name for step in STEPS if step.name not in day.outcomes]:
        print(f"not begun, the time was over: {', '.join(late)}; the same command goes on")
    print(f"report: {day.out / REPORT}")
    return 0 if all(day.is_done(step.name) for step in STEPS) else 1


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser("scripts/gpu_day", description=__doc__)
    commands = parser.add_subparsers(dest="command", required=True)
    commands.add_parser("pack", help="make what has to travel")
    running = commands.add_parser("run", help="do the steps, or go on with them")
    running.add_argument("--out", type=Path, default=PACK.parent / "out", help="report and state")
    running.add_argument("--work", type=Path, default=PACK.parent / "work", help="gigabytes")
    running.add_argument("--minutes", type=float, default=9.5, help="end before so many are over")
    running.add_argument(
        "--stand-in", type=Path, help="an installed Ollama whose library simulates a GPU: to try it"
    )
    given = parser.parse_args(arguments)
    if given.command == "pack":
        from scripts.gpuday import pack  # where it is packed, all that it imports is at hand

        pack.make()
        return 0
    stand_in = given.stand_in.absolute() if given.stand_in else None
    day = Day(given.out.absolute(), given.work.absolute(), stand_in)
    return run(day, given.minutes)


if __name__ == "__main__":
    sys.exit(main())
