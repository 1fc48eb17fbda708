"""One query over a long cache, compared with read bandwidth and ggml with and without flash
attention.
"""

from __future__ import annotations

from typing import Final

from measure.attention import limits
from measure.attention.rig import (
    CACHED,
    FLASH,
    FMA,
    OURS,
    PLAIN,
    READ,
    AttentionRig,
    Comparison,
    compare,
    heads,
    milliseconds,
    roofline,
)
from measure.results import Ratio, Section
from ollama_tiering.kernels.samples import Problem

KEYS: Final = 65536
SHORT_KEYS: Final = 8192
OF_READ: Final = 0.80
BOUNDS: Final = {FLASH: 20.0, PLAIN: 4.5}
REPEATS: Final = 10  # in one turn, of some milliseconds each


def measure(rig: AttentionRig) -> Section:
    ratios: list[Ratio] = []
    seconds = {}
    for n_cells in sorted({rig.keys(KEYS), rig.keys(SHORT_KEYS)}, reverse=True):
        rig.say(f"decode, {n_cells:,} keys")
        comparison = compare(rig, decode_problem(n_cells), repeats=REPEATS, cached=True)
        ratios += _ratios(comparison)
        seconds.update(comparison.seconds(f"{n_cells:,} keys"))
    notes = [
        f"One query of {heads(decode_problem(1))}, D 128, f16, {rig.threads} threads, {rig.isa}. "
        "Bytes: K and V, each once. The call from Python is in our time.",
        "Read bandwidth: as many threads add up 512 MiB, the best of several ways to read it. A "
        f"cache of {SHORT_KEYS:,} keys may stay in the processor's own: no bound there. memcpy: "
        f"{rig.peaks.copy_bytes() / 1e9:.1f} GB/s, each byte counted once.",
        limits.NOTE,
        *how(rig),
        *rig.notes(),
    ]
    return Section(
        "decode", "CPU decode", "ratio, logarithmic", ratios, notes, log_axis=True, seconds=seconds
    )


def _ratios(comparison: Comparison) -> list[Ratio]:
    problem, ours = comparison.problem, comparison.series[OURS]
    bounded = problem.n_cells == KEYS
    name = f"{problem.n_cells:,} keys"
    read = comparison.rate(READ)
    measured = f"{milliseconds(ours)}, error {comparison.errors[OURS]:.1e}"
    ratios = [
        Ratio(
            f"{name}, ours ÷ read bandwidth",
            f"{comparison.bytes_per_second / 1e9:.1f} GB/s "
            f"({comparison.flops / 1e9:.0f} GFLOP/s), {measured}",
            f"{read / 1e9:.1f} GB/s, {roofline(problem, comparison.series)}",
            comparison.bytes_per_second / read,
            OF_READ if bounded else None,
        )
    ]
    if CACHED in comparison.series:
        ratios += _limits(name, comparison)
    for side in (FLASH, PLAIN):
        if side in comparison.series:
            theirs = comparison.series[side]
            against = f"{milliseconds(theirs)}, error {comparison.errors[side]:.1e}"
            bound = BOUNDS[side] if bounded else None
            value = theirs.best / ours.best
            ratios.append(Ratio(f"{name}, {side} ÷ ours", measured, against, value, bound))
    return ratios


def _limits(name: str, comparison: Comparison) -> list[Ratio]:
    problem, series = comparison.problem, comparison.series
    cached = series[CACHED]
    ratios = limits.of_memory(name, problem, series[OURS], cached, series[READ])
    if FMA in series:
        ratios.append(limits.of_arithmetic(name, problem, cached, series[FMA]))
    return ratios


def decode_problem(n_cells: int) -> Problem:
    return Problem(40, 8, 128, 128, n_cells)


def how(rig: AttentionRig) -> list[str]:
    return [
        f"Best of {rig.rounds} rounds in which every side has its turn of several runs; the ratios "
        "are of the bests. Roofline: reading K and V once at the read bandwidth, or the "
        "multiply-adds at their peak, whichever takes longer."
    ]
