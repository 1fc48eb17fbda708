"""Relative L2 error against f64 over the dequantised K and V, for 1 to 128K keys."""

from __future__ import annotations

from typing import Final

import numpy as np

from measure.attention.others import PEAKED, with_rounded_logits
from measure.attention.rig import (
    FLASH,
    OURS,
    PLAIN,
    AttentionRig,
    checked_queries,
    heads,
    run_ours,
)
from measure.attention.sides import ggml
from measure.results import Ratio, Section
from ollama_tiering.kernels.samples import (
    DIFFUSE,
    SHARP,
    Problem,
    Sample,
    exact,
    make,
    relative_error,
)
from ollama_tiering.kernels.shape import Dtype

BOUND: Final = 1e-5
KEYS: Final = (1, 100, 1024, 8192, 65536, 131072)
DTYPES: Final = (Dtype.F16, Dtype.BF16, Dtype.Q8_0, Dtype.Q4_0)
LOGITS: Final = {"diffuse": DIFFUSE, "sharp": SHARP, "peaked": PEAKED}
ROUNDED: Final = "f64 with logits rounded to f32"
_PREFILL_QUERIES: Final = 64
_OTHERS_FROM_KEYS: Final = 1024


def measure(rig: AttentionRig) -> Section:
    ratios = []
    for n_cells in sorted({rig.keys(keys) for keys in KEYS}):
        for logits, deviation in LOGITS.items():
            rig.say(f"accuracy, {n_cells:,} keys, {logits}")
            ratios += _ratios(rig, n_cells, logits, deviation)
    notes = [
        f"{heads(_problem(1, 1, Dtype.F16, DIFFUSE))}, D 128, V with mean 0.3, causal. Against an "
        "f64 loop over the dequantised K and V; the worst of the data types, of the last query "
        f"alone (decode) and of some of the last {_PREFILL_QUERIES} (prefill). ggml in f16 only.",
        f"Logits of deviation {DIFFUSE:g} (diffuse), {SHARP:g} (sharp), {PEAKED:g} (peaked).",
        f"{ROUNDED.capitalize()}: what is lost by rounding each logit once and nothing else. A "
        "logit of 1,000 in f32 is off by 3e-5, and so is its weight; it shows where two keys share "
        "the weight.",
        *rig.notes(),
    ]
    title, axis = "Error against f64", "relative L2 error, logarithmic"
    return Section("accuracy", title, axis, ratios, notes, log_axis=True)


def _ratios(rig: AttentionRig, n_cells: int, logits: str, deviation: float) -> list[Ratio]:
    worst: dict[str, dict[str, float]] = {}  # by side and data type
    for dtype in DTYPES:
        for n_q in sorted({1, min(_PREFILL_QUERIES, n_cells)}):
            sample = make(_problem(n_cells, n_q, dtype, deviation))
            for side, error in _errors(rig, sample).items():
                of_side = worst.setdefault(side, {})
                name = dtype.name.lower()
                of_side[name] = float(np.maximum(error, of_side.get(name, error)))  # nan stays
    what = f"{n_cells:,} {'key' if n_cells == 1 else 'keys'}, {logits}"
    return [
        Ratio(
            f"{what}, {side}",
            ", ".join(f"{name} {error:.1e}" for name, error in errors.items()),
            "f64",
            float(np.max(list(errors.values()))),
            BOUND if side == OURS else None,
            at_most=True,
        )
        for side, errors in worst.items()
    ]


def _errors(rig: AttentionRig, sample: Sample) -> dict[str, float]:
    """Errors by side, all over the same queries."""
    problem = sample.problem
    queries = checked_queries(problem.n_q)
    right = exact(sample, queries)
    errors = {OURS: relative_error(run_ours(rig, sample)[queries], right)}
    if problem.n_cells < _OTHERS_FROM_KEYS:
        return errors
    if rig.ggml_program is not None and problem.k_type is Dtype.F16:
        with ggml(rig.ggml_program, sample, rig.threads) as theirs:
            for side, flash in ((FLASH, True), (PLAIN, False)):
                theirs.turn(flash=flash, repeats=1)
                errors[side] = relative_error(theirs.out[queries], right)
    return errors | {ROUNDED: relative_error(with_rounded_logits(sample, queries), right)}


def _problem(n_cells: int, n_q: int, dtype: Dtype, deviation: float) -> Problem:
    return Problem(
        n_head=10,
        n_kv_head=2,
        d_k=128,
        d_v=128,
        n_cells=n_cells,
        n_q=n_q,
        k_type=dtype,
        v_type=dtype,
        query_deviation=deviation,
    )
