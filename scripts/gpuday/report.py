"""The report of scripts/gpu_day: Markdown, as the records of docs/measurements. It says only what
was measured.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import Any

from scripts.gpuday.steps import BEGUN, DONE, FAILED, LACKING, TIMEOUT, Bound, Outcome, State, Step

_WORDS = {
    DONE: "done",
    FAILED: "FAILED",
    LACKING: "not possible",
    TIMEOUT: "NOT IN TIME",
    BEGUN: "begun, not ended",
}


def text(steps: Sequence[Step], state: State, wanted: Iterable[Bound]) -> str:
    """`wanted` are the bounds that the day is for; those that no step measured stay open."""
    stand_in = state.about.get("stand_in")
    lines = ["# A day with a GPU", "", *_head(state.about)]
    if stand_in:
        lines += [
            "",
            "> **No GPU was used.** A library that simulates one stood in for it "
            f"(`{stand_in}`). No rate here says anything of a GPU, and no bound is judged.",
        ]
    lines += ["", "## Steps", "", "| step | what | result | seconds |", "|---|---|---|---|"]
    lines += [_row(step, state.outcomes.get(step.name)) for step in steps]
    lines += ["", "## Bounds", "", *_bounds(state, wanted, judged=not stand_in)]
    for step in steps:
        if outcome := state.outcomes.get(step.name):
            lines += ["", f"## {step.name}: {step.title}", "", *_section(outcome)]
    return "\n".join(lines) + "\n"


def _head(about: dict[str, Any]) -> list[str]:
    words = ("machine", "gpu", "measured", "settings", "command")
    return [f"- {word.capitalize()}: {about[word]}" for word in words if about.get(word)]


def _row(step: Step, outcome: Outcome | None) -> str:
    if outcome is None:
        return f"| {step.name} | {step.title} | not begun | |"
    result = _WORDS[outcome.status]
    if outcome.status != DONE and outcome.why:
        result += f": {_cell(outcome.why)}"
    seconds = f"{outcome.seconds:.0f}" if outcome.seconds else ""
    return f"| {step.name} | {step.title} | {result} | {seconds} |"


def _bounds(state: State, wanted: Iterable[Bound], *, judged: bool) -> Iterator[str]:
    measured = [b for one in state.outcomes.values() for b in one.bounds if b.value is not None]
    names = {bound.name for bound in measured}
    yield "| what | bound | measured | |"
    yield "|---|---|---|---|"
    for bound in [*measured, *(b for b in wanted if b.name not in names)]:
        sign = "≥" if bound.at_least else "≤"
        value = "-" if bound.value is None else f"{bound.value:.3f}"
        yield f"| {bound.name} | {sign} {bound.limit:g} | {value} | {_verdict(bound, judged)} |"


def _verdict(bound: Bound, judged: bool) -> str:
    if bound.value is None:
        return "open: not measured"
    if not judged:
        return "not judged: no GPU"
    return "holds" if bound.holds else "**does not hold**"


def _section(outcome: Outcome) -> Iterator[str]:
    yield f"Result: {_WORDS[outcome.status]}{f', {outcome.why}' if outcome.why else ''}."
    if outcome.cure:
        yield f"Cure: {outcome.cure}."
    if outcome.lines:
        yield ""
        yield from outcome.lines


def _cell(text: str) -> str:
    return " ".join(text.split()).replace("|", "\\|")
