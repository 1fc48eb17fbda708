"""The report of scripts/gpu_day: Markdown, as the records of docs/measurements. It says only what
was measured.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from scripts.gpuday.steps import BEGUN, DONE, FAILED, LACKING, TIMEOUT, Day, Outcome, Step

LEAST, MOST = "≥", "≤"
BOUNDS = {
    "restore": ("rows restored into VRAM, bytes/s ÷ pinned copy", LEAST, 0.80),
    "vram": ("VRAM decode ÷ device read rate, the least of all cases", LEAST, 0.70),
    "cold": ("cold decode ÷ pinned copy", LEAST, 0.95),
    "step": ("cold decode, step time ÷ max(copy, compute)", MOST, 1.10),
    "all hot": ("all hot ÷ stock, tokens/s", LEAST, 0.98),
    "staging": ("staged bytes of a token per second ÷ pinned copy", LEAST, 0.90),
    "ahead": ("time that copying ahead saves ÷ the shorter of copies and computing", LEAST, 0.80),
}
_WORDS = {
    DONE: "done",
    FAILED: "FAILED",
    LACKING: "not possible",
    TIMEOUT: "NOT IN TIME",
    BEGUN: "begun, not ended",
}


def text(day: Day, steps: Iterable[Step]) -> str:
    lines = ["# A day with a GPU", "", *day.figures("look").get("head", ())]
    if day.stand_in:
        lines += [
            "",
            "> **No GPU was used.** A library that simulates one stood in for it "
            f"(`{day.stand_in}`), with small sizes. No rate here says anything of a GPU, and no "
            "bound is judged.",
        ]
    lines += ["", "## Bounds", "", "| what | bound | measured | |", "|---|---|---|---|"]
    measured = {name: value for one in day.outcomes.values() for name, value in one.bounds.items()}
    for name, (what, sign, limit) in BOUNDS.items():
        said = _verdict(measured.get(name), sign, limit, judged=not day.stand_in)
        lines.append(f"| {what} | {sign} {limit:g} | {said} |")
    lines += ["", "## Steps", "", "| step | what | result | seconds |", "|---|---|---|---|"]
    parts: list[str] = []
    for step in steps:
        result = seconds = ""
        if outcome := day.outcomes.get(step.name):
            result = f"{_WORDS[outcome.status]}{f': {outcome.why}' if outcome.why else ''}"
            seconds = f"{outcome.seconds:.0f}"
            parts += ["", f"## {step.name}: {step.title}", "", *_part(outcome, result)]
        cell = " ".join(result.split()).replace("|", "\\|") or "not begun"
        lines.append(f"| {step.name} | {step.title} | {cell} | {seconds} |")
    return "\n".join([*lines, *parts]) + "\n"


def _verdict(value: float | None, sign: str, limit: float, *, judged: bool) -> str:
    if value is None:
        return "- | open: not measured"
    if not judged:
        return f"{value:.3f} | not judged: no GPU"
    holds = value >= limit if sign == LEAST else value <= limit
    return f"{value:.3f} | {'holds' if holds else '**does not hold**'}"


def _part(outcome: Outcome, result: str) -> Iterator[str]:
    yield f"Result: {result}."
    if outcome.cure:
        yield f"Cure: {outcome.cure}."
    if outcome.lines:
        yield ""
        yield from outcome.lines
