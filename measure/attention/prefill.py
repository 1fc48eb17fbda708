"""A prompt of 8K in batches of 512, compared with the FMA peak and ggml with and without flash
attention.
"""

from __future__ import annotations

from typing import Final

from measure.attention.rig import (
    FLASH,
    FMA,
    OURS,
    PLAIN,
    AttentionRig,
    Comparison,
    compare,
    heads,
    roofline,
)
from measure.results import Ratio, Section
from ollama_tiering.kernels.samples import Problem

KEYS: Final = 8192
OF_PEAK: Final = 0.75
HEADS: Final = ((16, 8), (40, 8))
# ggml's seconds over ours, with flash attention and without, by the instruction set of both
BOUNDS: Final = {"avx512": {FLASH: 18.0, PLAIN: 3.5}, "avx2": {FLASH: 10.0, PLAIN: 3.0}}


def measure(rig: AttentionRig) -> Section:
    ratios: list[Ratio] = []
    seconds = {}
    for n_head, n_kv_head in HEADS:
        n_cells = rig.keys(KEYS)
        problem = Problem(n_head, n_kv_head, 128, 128, n_cells, n_q=n_cells)
        rig.say(f"prefill, {n_cells:,} tokens, {heads(problem)}")
        comparison = compare(rig, problem, repeats=1)
        ratios += _ratios(rig, comparison)
        seconds.update(comparison.seconds(heads(problem)))
    notes = [
        f"A prompt of {rig.keys(KEYS):,} tokens in batches of 512, causal, f16, D 128, "
        f"{rig.threads} threads, {rig.isa}. FLOP: the pairs that the mask leaves, "
        "2 (d_k + d_v) for each.",
        "FMA peak: 12 independent chains of f32 multiply-adds in registers, as many threads, the "
        "same instruction set.",
        f"Best of {rig.rounds} rounds in which every side has its turn; the ratios are of the "
        "bests. Error: relative L2 against f64, of some of the queries.",
        *rig.notes(),
    ]
    return Section(
        "prefill",
        "CPU prefill",
        "ratio, logarithmic",
        ratios,
        notes,
        log_axis=True,
        seconds=seconds,
    )


def _ratios(rig: AttentionRig, comparison: Comparison) -> list[Ratio]:
    name = heads(comparison.problem)
    ours = comparison.series[OURS]
    measured = f"{ours.best:.3f} s (median {ours.median:.3f}), error {comparison.errors[OURS]:.1e}"
    ratios = []
    if FMA in comparison.series:
        peak = comparison.rate(FMA)
        ratios.append(
            Ratio(
                f"{name}, ours ÷ FMA peak",
                f"{comparison.flops / 1e9:.0f} GFLOP/s, {measured}",
                f"{peak / 1e9:.0f} GFLOP/s, {roofline(comparison.problem, comparison.series)}",
                comparison.flops / peak,
                rig.bound(OF_PEAK, KEYS),
            )
        )
    for side in (FLASH, PLAIN):
        if side in comparison.series:
            theirs = comparison.series[side]
            against = (
                f"{theirs.best:.3f} s (median {theirs.median:.3f}), "
                f"error {comparison.errors[side]:.1e}"
            )
            bound = rig.bound(BOUNDS.get(rig.isa, {}).get(side), KEYS)
            value = theirs.best / ours.best
            ratios.append(Ratio(f"{name}, {side} ÷ ours", measured, against, value, bound))
    return ratios
