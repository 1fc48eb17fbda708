"""What all parts of it share, and one problem run by all sides in turns."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

import numpy as np
from numpy.typing import NDArray

from measure.attention.alternate import Series, Turn, alternate
from measure.attention.others import in_cache
from measure.attention.peaks import Peaks
from measure.attention.sides import Ours, ggml
from ollama_tiering.kernels.cpu import CpuAttention
from ollama_tiering.kernels.samples import Problem, Sample, exact, make, relative_error

OURS, FLASH, PLAIN = "ours", "ggml flash", "ggml without flash"
CACHED = "ours, in cache"
FMA, READ = "FMA peak", "read bandwidth"

_CHECKED_QUERIES: Final = 5


@dataclass(frozen=True)
class AttentionRig:
    """`isa` is the one that runs, not "auto". If `ggml_program` is None, `why_no_ggml` says why."""

    threads: int
    isa: str
    rounds: int
    peaks: Peaks
    ggml_program: Path | None
    why_no_ggml: str = ""
    max_keys: int | None = None
    say: Callable[[str], None] = field(default=lambda _text: None)

    def keys(self, wanted: int) -> int:
        """At most as many as --keys says."""
        return wanted if self.max_keys is None else min(wanted, self.max_keys)

    def bound(self, value: float | None, keys: int) -> float | None:
        """A bound holds for a number of keys; with fewer keys there is none."""
        return value if self.keys(keys) == keys else None

    def peak_turns(self) -> dict[str, Turn]:
        """FMA (if the instruction set has it) and READ: seconds per operation and per byte."""
        turns: dict[str, Turn] = {READ: lambda: [1 / self.peaks.read_bytes()]}
        if self.peaks.fma_flops(self.isa):
            turns[FMA] = lambda: [1 / self.peaks.fma_flops(self.isa)]
        return turns

    def notes(self) -> list[str]:
        return [] if self.ggml_program else [f"No line for ggml: {self.why_no_ggml}."]


@dataclass(frozen=True, slots=True)
class Comparison:
    """All sides of one problem: seconds, and relative L2 error against f64 by side.

    The series of FMA and READ are seconds per operation and per byte.
    """

    problem: Problem
    series: Mapping[str, Series]
    errors: Mapping[str, float]

    def best(self, side: str) -> float:
        return self.series[side].best

    def rate(self, side: str) -> float:
        """A machine's peak: the best rate, per second."""
        return 1 / self.series[side].best

    @property
    def flops(self) -> float:
        return self.problem.flops / self.best(OURS)

    @property
    def bytes_per_second(self) -> float:
        return self.problem.kv_bytes / self.best(OURS)

    def seconds(self, name: str) -> dict[str, Sequence[float]]:
        """Every run of attention, for the JSON document."""
        sides = (OURS, CACHED, FLASH, PLAIN)
        return {f"{name}, {s}": self.series[s].seconds for s in sides if s in self.series}


def compare(
    rig: AttentionRig, problem: Problem, *, repeats: int, cached: bool = False
) -> Comparison:
    """`repeats` are the runs in one turn, the same for all sides, because the best of more runs is
    better. The machine's peaks have turns of their own. With `cached`, ours has one more turn, with
    rows that stay in a cache.
    """
    sample = make(problem)
    quantised = problem.v_type.block_values > 1
    with contextlib.ExitStack() as stack:
        ours = Ours(sample, rig.threads, rig.isa, repeats)
        stack.callback(ours.close)
        sides: dict[str, Turn] = {OURS: ours.turn, **rig.peak_turns()}
        if cached:
            near = Ours(in_cache(sample), rig.threads, rig.isa, repeats)
            stack.callback(near.close)
            sides[CACHED] = near.turn
        outputs: dict[str, NDArray[np.float32]] = {}
        if rig.ggml_program is not None:
            theirs = stack.enter_context(ggml(rig.ggml_program, sample, rig.threads))

            def turn(name: str, flash: bool) -> Sequence[float]:
                seconds = theirs.turn(flash=flash, repeats=repeats)
                outputs[name] = theirs.out
                return seconds

            sides[FLASH] = lambda: turn(FLASH, True)
            if not quantised:  # Ollama refuses a quantised V without flash attention
                sides[PLAIN] = lambda: turn(PLAIN, False)
        series = alternate(sides, rig.rounds)
        outputs[OURS] = ours.out
    queries = checked_queries(problem.n_q)
    right = exact(sample, queries)
    errors = {name: relative_error(out[queries], right) for name, out in outputs.items()}
    return Comparison(problem, series, errors)


def roofline(problem: Problem, series: Mapping[str, Series]) -> str:
    """The least time that reading K and V once, or the multiply-adds alone, would take."""
    limits = {"reading": problem.kv_bytes * series[READ].best}
    if FMA in series:
        limits["multiply-adds"] = problem.flops * series[FMA].best
    limit = max(limits, key=limits.__getitem__)
    return f"roofline {1e3 * limits[limit]:.3g} ms ({limit})"


def running_isa(isa: str) -> str:
    """What "auto" is on this machine. PaError if it lacks the one asked for."""
    with CpuAttention(Problem(1, 1, 64, 64, 1).shape, 1, isa) as plan:
        return plan.isa


def checked_queries(n_q: int) -> list[int]:
    """A few queries, including the first and the last: f64 is slow."""
    return sorted({round(i * (n_q - 1) / (_CHECKED_QUERIES - 1)) for i in range(_CHECKED_QUERIES)})


def run_ours(rig: AttentionRig, sample: Sample) -> NDArray[np.float32]:
    """The output of one turn."""
    ours = Ours(sample, rig.threads, rig.isa, 1)
    try:
        ours.turn()
        return ours.out
    finally:
        ours.close()


def heads(problem: Problem) -> str:
    return f"{problem.n_head}/{problem.n_kv_head} heads"


def milliseconds(series: Series) -> str:
    return f"{1e3 * series.best:.4g} ms (median {1e3 * series.median:.4g})"
