"""Rows 3, 4 and 10: one query over a long cache; quantised caches; peaked logits."""

from __future__ import annotations

from dataclasses import replace
from typing import Final

from ollama_tiering.bench.attention.alternate import Series, alternate
from ollama_tiering.bench.attention.rig import (
    FLASH,
    OURS,
    PLAIN,
    READ,
    Comparison,
    Rig,
    compare,
    heads,
    milliseconds,
)
from ollama_tiering.bench.attention.sides import Ours
from ollama_tiering.bench.tiers.results import Ratio, Section
from ollama_tiering.kernels.samples import PEAKED, Problem, make
from ollama_tiering.kernels.shape import Dtype

KEYS: Final = 65536
SHORT_KEYS: Final = 8192
OF_READ: Final = 0.80
BOUNDS: Final = {FLASH: 20.0, PLAIN: 4.5}
QUANT_BOUNDS: Final = {Dtype.Q8_0: 0.75, Dtype.Q4_0: 0.65}
PEAKED_BOUND: Final = 1.2
_REPEATS: Final = 10  # in one turn, of some milliseconds each


def measure(rig: Rig) -> Section:
    ratios: list[Ratio] = []
    seconds = {}
    for n_cells in sorted({rig.keys(KEYS), rig.keys(SHORT_KEYS)}, reverse=True):
        rig.say(f"decode, {n_cells:,} keys")
        comparison = compare(rig, _decode(n_cells), repeats=_REPEATS, ggml_repeats=3, peak=READ)
        ratios += _ratios(comparison)
        seconds.update(comparison.seconds(f"{n_cells:,} keys"))
    notes = [
        f"One query of {heads(_decode(1))}, D 128, f16, {rig.threads} threads, {rig.isa}. Bytes: K "
        "and V, each once. The call from Python is in our time.",
        "Read bandwidth: as many threads add up 512 MiB, the best of several ways to read it. A "
        f"cache of {SHORT_KEYS:,} keys may stay in the processor's own: no bound there.",
        *_how(rig),
        *rig.notes(),
    ]
    return Section(
        "decode", "CPU decode", "ratio, logarithmic", ratios, notes, log_axis=True, seconds=seconds
    )


def measure_quantised(rig: Rig) -> Section:
    n_cells = rig.keys(KEYS)
    rig.say(f"quantised K and V, {n_cells:,} keys")
    problems = {
        dtype.name.lower(): replace(_decode(n_cells), k_type=dtype, v_type=dtype)
        for dtype in (Dtype.F16, *QUANT_BOUNDS)
    }
    series = _in_turns(rig, problems, _REPEATS)
    f16 = series["f16"]
    ratios = [
        Ratio(
            f"decode, {n_cells:,} keys, {dtype.name.lower()} ÷ f16",
            f"{milliseconds(series[dtype.name.lower()])}, "
            f"{_rate(problems[dtype.name.lower()], series[dtype.name.lower()])}",
            f"{milliseconds(f16)}, {_rate(problems['f16'], f16)}",
            series[dtype.name.lower()].best / f16.best,
            rig.bound(bound, KEYS),
            at_most=True,
        )
        for dtype, bound in QUANT_BOUNDS.items()
    ]
    bytes_of = {name: problem.kv_bytes for name, problem in problems.items()}
    notes = [
        f"One query of {heads(problems['f16'])}, D 128, K and V alike, {rig.threads} threads, "
        f"{rig.isa}. By bytes alone q8_0 would be {bytes_of['q8_0'] / bytes_of['f16']:.2f} and "
        f"q4_0 {bytes_of['q4_0'] / bytes_of['f16']:.2f}; what is above is the widening's.",
        *_how(rig),
    ]
    seconds = {name: one.seconds for name, one in series.items()}
    return Section("quant", "Quantised caches", "time ÷ f16", ratios, notes, seconds=seconds)


def measure_peaked(rig: Rig) -> Section:
    tokens = rig.keys(SHORT_KEYS)
    cases = {
        f"decode, {rig.keys(KEYS):,} keys": (_decode(rig.keys(KEYS)), _REPEATS),
        f"prefill, {tokens:,} tokens": (Problem(16, 8, 128, 128, tokens, n_q=tokens), 2),
    }
    ratios, seconds = [], {}
    for name, (problem, repeats) in cases.items():
        rig.say(f"peaked logits, {name}")
        pair = {"diffuse": problem, "peaked": replace(problem, query_deviation=PEAKED)}
        series = _in_turns(rig, pair, repeats)
        diffuse, peaked = series["diffuse"], series["peaked"]
        ratios.append(
            Ratio(
                f"{name}, {heads(problem)}, peaked ÷ diffuse",
                milliseconds(peaked),
                milliseconds(diffuse),
                peaked.best / diffuse.best,
                rig.bound(PEAKED_BOUND, KEYS),
                at_most=True,
            )
        )
        seconds.update({f"{name}, {side}": one.seconds for side, one in series.items()})
    notes = [
        f"Queries of deviation {PEAKED:g} against 1, f16, D 128, {rig.threads} threads, {rig.isa}. "
        "All but a few weights underflow: without flushing denormals to zero this is tens of times "
        "slower.",
        *_how(rig),
    ]
    return Section("peaked", "Peaked logits", "time ÷ diffuse", ratios, notes, seconds=seconds)


def _in_turns(rig: Rig, problems: dict[str, Problem], repeats: int) -> dict[str, Series]:
    ours = {
        name: Ours(make(problem), rig.threads, rig.isa, repeats)
        for name, problem in problems.items()
    }
    try:
        return alternate({name: one.turn for name, one in ours.items()}, rig.rounds)
    finally:
        for one in ours.values():
            one.close()


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
            f"{read / 1e9:.1f} GB/s",
            comparison.bytes_per_second / read,
            OF_READ if bounded else None,
        )
    ]
    for side in (FLASH, PLAIN):
        if side in comparison.series:
            theirs = comparison.series[side]
            against = f"{milliseconds(theirs)}, error {comparison.errors[side]:.1e}"
            bound = BOUNDS[side] if bounded else None
            value = theirs.best / ours.best
            ratios.append(Ratio(f"{name}, {side} ÷ ours", measured, against, value, bound))
    return ratios


def _decode(n_cells: int) -> Problem:
    return Problem(40, 8, 128, 128, n_cells)


def _rate(problem: Problem, series: Series) -> str:
    return f"{problem.kv_bytes / series.best / 1e9:.1f} GB/s"


def _how(rig: Rig) -> list[str]:
    return [
        f"Best of {rig.rounds} rounds in which every side has its turn of several runs; the ratios "
        "are of the bests."
    ]
