"""Decode with quantised caches compared with f16, and peaked logits compared with diffuse ones."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Final

from measure.attention import limits
from measure.attention.alternate import Series, alternate
from measure.attention.decode import (
    KEYS,
    REPEATS,
    SHORT_KEYS,
    decode_problem,
    how,
)
from measure.attention.others import PEAKED, in_cache
from measure.attention.rig import (
    FMA,
    READ,
    AttentionRig,
    heads,
    milliseconds,
    roofline,
)
from measure.attention.sides import Ours
from measure.results import Ratio, Section
from ollama_tiering.kernels.samples import Problem, Sample, make
from ollama_tiering.kernels.shape import Dtype

QUANT_BOUNDS: Final = {Dtype.Q8_0: 0.75, Dtype.Q4_0: 0.65}
PEAKED_BOUND: Final = 1.2


def measure_quantised(rig: AttentionRig) -> Section:
    n_cells = rig.keys(KEYS)
    rig.say(f"quantised K and V, {n_cells:,} keys")
    problems = {
        dtype.name.lower(): replace(decode_problem(n_cells), k_type=dtype, v_type=dtype)
        for dtype in (Dtype.F16, *QUANT_BOUNDS)
    }
    samples = {name: make(problem) for name, problem in problems.items()}
    samples |= {_cached(name): in_cache(sample) for name, sample in samples.items()}
    series = _in_turns(rig, samples, REPEATS)
    described = {
        name: f"{milliseconds(series[name])}, {_rate(problem, series[name])}, "
        f"{roofline(problem, series)}"
        for name, problem in problems.items()
    }
    ratios = [
        Ratio(
            f"decode, {n_cells:,} keys, {dtype.name.lower()} ÷ f16",
            described[dtype.name.lower()],
            described["f16"],
            series[dtype.name.lower()].best / series["f16"].best,
            rig.bound(bound, KEYS),
            at_most=True,
        )
        for dtype, bound in QUANT_BOUNDS.items()
    ]
    for name, problem in problems.items():
        what, cached = f"decode, {n_cells:,} keys, {name}", series[_cached(name)]
        if name != "f16":  # stands in the part about decode
            ratios += limits.of_memory(what, problem, series[name], cached, series[READ])
        if FMA in series:
            ratios.append(limits.of_arithmetic(what, problem, cached, series[FMA]))
    bytes_of = {name: problem.kv_bytes for name, problem in problems.items()}
    notes = [
        f"One query of {heads(problems['f16'])}, D 128, K and V alike, {rig.threads} threads, "
        f"{rig.isa}. By bytes alone q8_0 would be {bytes_of['q8_0'] / bytes_of['f16']:.2f} and "
        f"q4_0 {bytes_of['q4_0'] / bytes_of['f16']:.2f}; what is above is the widening's, which no "
        "roofline counts: the rows in cache ÷ multiply-adds alone show it.",
        limits.NOTE,
        *how(rig),
    ]
    seconds = {name: series[name].seconds for name in samples}
    return Section("quant", "Quantised caches", "ratio of times", ratios, notes, seconds=seconds)


def measure_peaked(rig: AttentionRig) -> Section:
    tokens = rig.keys(SHORT_KEYS)
    cases = {
        f"decode, {rig.keys(KEYS):,} keys": (decode_problem(rig.keys(KEYS)), REPEATS),
        f"prefill, {tokens:,} tokens": (Problem(16, 8, 128, 128, tokens, n_q=tokens), 2),
    }
    ratios, seconds = [], {}
    for name, (problem, repeats) in cases.items():
        rig.say(f"peaked logits, {name}")
        pair = {"diffuse": problem, "peaked": replace(problem, query_deviation=PEAKED)}
        samples = {side: make(one) for side, one in pair.items()}
        series = _in_turns(rig, samples, repeats)
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
        seconds.update({f"{name}, {side}": series[side].seconds for side in pair})
    notes = [
        f"Queries of deviation {PEAKED:g} against 1, f16, D 128, {rig.threads} threads, {rig.isa}. "
        "All but a few weights underflow: denormals that are not flushed to zero would show here.",
        *how(rig),
    ]
    return Section("peaked", "Peaked logits", "time ÷ diffuse", ratios, notes, seconds=seconds)


def _cached(name: str) -> str:
    return f"{name}, in cache"


def _in_turns(rig: AttentionRig, samples: Mapping[str, Sample], repeats: int) -> dict[str, Series]:
    """Results by the name of the sample; the machine's peaks besides."""
    ours = {name: Ours(sample, rig.threads, rig.isa, repeats) for name, sample in samples.items()}
    try:
        turns = {name: one.turn for name, one in ours.items()}
        return alternate(turns | rig.peak_turns(), rig.rounds)
    finally:
        for one in ours.values():
            one.close()


def _rate(problem: Problem, series: Series) -> str:
    return f"{problem.kv_bytes / series.best / 1e9:.1f} GB/s"
