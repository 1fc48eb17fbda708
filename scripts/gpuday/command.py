"""scripts/gpu_day: what to do with a machine that has an NVIDIA GPU, as long as there is one."""

from __future__ import annotations

import argparse
import datetime
import shutil
import sys
import time
from collections.abc import Sequence
from pathlib import Path

from scripts.gpuday import bounds, machine, pack, report, steps
from scripts.gpuday.day import FOLDER, PACK, ROOT, Day, steps_of
from scripts.gpuday.process import GRACE_S, STATE, launch
from scripts.gpuday.steps import LACKING, Outcome, State, Step

REPORT, LOG = "report.md", "steps.log"
MOST_LOG_BYTES = 1 << 20  # of a step, in what comes back


def run(day: Day, *, minutes: float, again: Sequence[str], before: Path | None) -> int:
    """`gpu_day run`: exit code 0 if every step is done, 1 if one is not."""
    deadline = time.monotonic() + 60 * minutes
    day.write()
    day.out.mkdir(parents=True, exist_ok=True)
    todo = steps_of(day)
    state = _earlier(day, before)

    def seconds_left() -> float:
        return deadline - time.monotonic() - GRACE_S

    def written() -> None:
        state.write(day.work / STATE)
        state.write(day.out / STATE)
        (day.out / REPORT).write_text(report.text(todo, state, bounds.WANTED), encoding="utf-8")

    def said(step: Step, limit_s: float) -> Outcome:
        print(f"* {step.name}: {step.title}", flush=True)
        outcome = launch(day, step, limit_s)
        if step.name == "look":
            _note_machine(state, outcome)
        why = f": {outcome.why}" if outcome.why else ""
        print(f"  {step.name}: {outcome.status}{why} ({outcome.seconds:.0f} s)", flush=True)
        _keep_log(day, step.name)
        return outcome

    late = steps.run(todo, state, said, seconds_left=seconds_left, written=written, again=again)
    written()
    for step in todo:
        outcome = state.outcomes.get(step.name)
        if outcome and outcome.status == LACKING:
            print(f"{step.name}: not possible: {outcome.why}", flush=True)
            if outcome.cure:
                print(f"  cure: {outcome.cure}", flush=True)
    if late:
        print(f"not begun, the time was over: {', '.join(late)}; the same command goes on")
    print(f"report: {day.out / REPORT}")
    return 0 if all(state.is_done(step.name) for step in todo) else 1


def _earlier(day: Day, before: Path | None) -> State:
    """The state of an earlier command of this day, from where there is one; with another program or
    other sizes it is another day.
    """
    about = {
        "stand_in": str(day.program) if day.stand_in else "",
        "settings": "small sizes" if day.small else "",
        "command": "scripts/gpu_day run",
        "measured": _when(day),
    }
    for path in (day.out / STATE, day.work / STATE, before):
        old = State.read(path) if path else State()
        same = all(old.about.get(name) == about[name] for name in ("stand_in", "settings"))
        if old.outcomes and same:
            old.about |= about
            return old
    return State(about)


def _note_machine(state: State, outcome: Outcome) -> None:
    """What was measured on another GPU is not this one's: it is forgotten."""
    facts = outcome.figures
    if not facts:
        return
    gpu = ", ".join(f"{one['name']} ({one['driver']})" for one in facts["gpus"])
    if state.about.get("gpu", gpu) != gpu:
        state.outcomes = {name: one for name, one in state.outcomes.items() if name == "look"}
    state.about["gpu"] = gpu
    state.about["machine"] = machine.words(facts)[0].removeprefix("- ")


def _when(day: Day) -> str:
    """The time, and the commit: by git, or by the pack where a checkout came without."""
    date = datetime.datetime.now(datetime.UTC).strftime("%Y-%m-%d %H:%M UTC")
    commit = _commit() or pack.read_about(day.pack).get("commit")
    return f"{date}, commit {commit or 'not told (no git here)'}"


def _commit() -> str:
    return machine.ask("git", "-C", ROOT, "rev-parse", "--short", "HEAD").strip()


def _keep_log(day: Day, name: str) -> None:
    """Few files come back from such a machine: all logs are in one."""
    text = (day.work / f"{name}.log").read_bytes()[-MOST_LOG_BYTES:]
    with (day.out / LOG).open("ab") as log:
        log.write(f"\n===== {name}, {_when(day)}\n".encode() + text)


def make_pack(target: Path, program: Path) -> int:
    """`gpu_day pack`: exit code 1 if it is more than may travel."""
    locks = [ROOT / "requirements.lock", ROOT / "requirements-models.lock"]
    shutil.rmtree(target, ignore_errors=True)
    say = lambda text: print(f"* {text}", flush=True)  # noqa: E731
    parts = pack.make(target, program, locks, say, _commit())
    parts["the checkout"] = pack.checkout_bytes(ROOT)
    total = sum(parts.values())
    for name, size in parts.items():
        print(f"{name:<16} {size / pack.MIB:6.1f} MiB")
    print(f"{'together':<16} {total / pack.MIB:6.1f} MiB of {pack.MOST_BYTES / pack.MIB:.0f}")
    if total > pack.MOST_BYTES:
        print("error: that is more than may travel", file=sys.stderr)
        return 1
    if pack.read_about(target)["processor"]:
        print(
            "the program is for this machine's processor (`tiering patch --cpu variants`: for all)"
        )
    print(f'carry {target}; there: scripts/gpu_day run --out "$OUT" --minutes 9.5')
    return 0


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser("scripts/gpu_day", description=__doc__)
    commands = parser.add_subparsers(dest="command", required=True)
    packing = commands.add_parser("pack", help="make what has to travel")
    packing.add_argument(
        "--program", type=Path, help="a patched Ollama in the tree it was built from"
    )
    packing.add_argument("--pack", type=Path, default=PACK, help="folder to write")
    running = commands.add_parser("run", help="do the steps, or go on with them")
    running.add_argument("--out", type=Path, default=FOLDER / "out", help="report and state")
    running.add_argument("--work", type=Path, default=FOLDER / "work", help="gigabytes")
    running.add_argument("--pack", type=Path, default=PACK, help="what `pack` made")
    running.add_argument("--before", type=Path, help="state.json of an earlier command")
    running.add_argument("--minutes", type=float, default=60, help="end before so many are over")
    running.add_argument("--again", action="append", default=[], help="a step to do once more")
    running.add_argument("--small", action="store_true", help="a small model, short prompts")
    which = running.add_mutually_exclusive_group()
    which.add_argument("--program", type=Path, help="an installed Ollama that pages; none is built")
    which.add_argument("--stand-in", type=Path, help="one whose library simulates a GPU: to try it")
    given = parser.parse_args(arguments)
    if given.command == "pack":
        return make_pack(given.pack.absolute(), _program(given.program))
    program = given.program or given.stand_in
    day = Day(
        given.out.absolute(),
        given.work.absolute(),
        given.pack.absolute(),
        program.absolute() if program else None,
        given.stand_in is not None,
        given.small or given.stand_in is not None,
    )
    names = [one.name for one in steps_of(day)]
    if unknown := [name for name in given.again if name not in names]:
        parser.error(f"no step {', '.join(unknown)}; there are {', '.join(names)}")
    return run(day, minutes=given.minutes, again=given.again, before=given.before)


def _program(named: Path | None) -> Path:
    from ollama_tiering.patchset.binary import ready_binary

    found = named or ready_binary()
    if found is None:
        raise SystemExit("error: no patched Ollama is built; `scripts/tiering patch` builds one")
    return found.absolute()


if __name__ == "__main__":
    sys.exit(main())
