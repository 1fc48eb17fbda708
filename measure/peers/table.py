"""What was measured, as a table: a row for each prompt length and side. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from measure.peers.sides import NEW_TOKENS, OURS, NotMeasured, SideCase, quartiles
from ollama_tiering.bench.table import Table, ratio, seconds

PORTABLE = (
    "What a library was built for is what it, or its build, says. Wheels are portable builds that "
    "leave out instructions this machine may have: they are what a user gets through pip, and no "
    "upper bound of what the project reaches when it is built for this machine."
)


def table(
    shape: str,
    cases: Sequence[SideCase],
    failures: Sequence[NotMeasured],
    *,
    threads: int,
    batch_tokens: int,
    stock: str,
) -> Table:
    """The better setting of a program is bold, for each of the two figures separately. `stock` says
    which program stock is.
    """
    headings = ["prompt", "program", "setting", "built for", "first token", "÷ ours", "decode",
                "ours ÷", "runs"]  # fmt: skip
    rows = []
    for case in cases:
        same = [other for other in cases if other.prompt_tokens == case.prompt_tokens]
        ours = next(other for other in same if other.program == OURS)
        own = [other for other in same if other.program == case.program]
        first = _spread(seconds(case.first_median), map(seconds, quartiles(case.first_seconds)))
        rates = quartiles(case.decode_rates)
        rate = _spread(f"{case.rate_median:.1f}", (f"{value:.1f}" for value in rates))
        rows.append(
            [
                f"{case.prompt_tokens:,}",
                f"{case.program} ({case.engine})",
                case.setting,
                case.built_for,
                _bold(first, case is _soonest(own)),
                "" if case is ours else ratio(case.first_median / ours.first_median),
                _bold(f"{rate} tokens/s", case is _fastest(own)),
                "" if case is ours else ratio(ours.rate_median / case.rate_median),
                str(len(case.first_seconds)),
            ]
        )
    notes = [
        *verdicts(cases),
        "Medians (quartiles) of the runs; the sides took turns, each in a process of its own, one "
        "at a time, with the same prompt in a round and a new one in each. Seconds are counted by "
        "the client from the request to the first token, with the model loaded and nothing known "
        f"of the prompt; decode is the {NEW_TOKENS - 1} tokens after the first, counted likewise.",
        f"All: threads {threads}, batches of {batch_tokens}, an f16 cache, greedy. Bold: the "
        f"better setting of a program. Stock: {stock}.",
        PORTABLE,
        "Every side's log probabilities of the first token were compared with ours: it is the same "
        "model. The quality of answers was not compared.",
        *_shortest_only(cases, failures),
        *(f"Not measured, or not all of it: {one.name}: {one.reason}" for one in failures),
    ]
    return Table(f"Beside stock, llama.cpp and ik_llama.cpp, {shape}", headings, rows, notes)


def verdicts(cases: Sequence[SideCase]) -> list[str]:
    """Ours against the better setting of each other program, for each length and figure."""
    lines = []
    for length in dict.fromkeys(case.prompt_tokens for case in cases):
        same = [case for case in cases if case.prompt_tokens == length]
        (ours,) = (case for case in same if case.program == OURS)
        for program in dict.fromkeys(case.program for case in same if case is not ours):
            own = [case for case in same if case.program == program]
            soonest, fastest = _soonest(own), _fastest(own)
            lines.append(
                f"{length:,} tokens, {program}: first token "
                f"{_ahead(soonest.first_median / ours.first_median)} ({soonest.setting}), decode "
                f"{_ahead(ours.rate_median / fastest.rate_median)} ({fastest.setting})."
            )
    return lines


def _shortest_only(cases: Sequence[SideCase], failures: Sequence[NotMeasured]) -> list[str]:
    """Sides that were not asked to run with every length."""
    failed = {one.name for one in failures}
    longest = max(case.prompt_tokens for case in cases)
    ran = {case.name for case in cases if case.prompt_tokens == longest}
    left_out = [name for name in dict.fromkeys(case.name for case in cases) if name not in ran]
    names = [name for name in left_out if name not in failed]
    return [f"With the shortest prompt only: {'; '.join(names)}."] if names else []


def _ahead(times: float) -> str:
    return f"{ratio(times)}, ours is {'ahead' if times > 1 else 'NOT ahead'}"


def _spread(middle: str, quarters: Iterable[str]) -> str:
    """A single run has none."""
    low, high = quarters
    return middle if low == high else f"{middle} ({low} to {high})"


def _soonest(cases: Sequence[SideCase]) -> SideCase:
    return min(cases, key=lambda case: case.first_median)


def _fastest(cases: Sequence[SideCase]) -> SideCase:
    return max(cases, key=lambda case: case.rate_median)


def _bold(text: str, bold: bool) -> str:
    return f"**{text}**" if bold else text
