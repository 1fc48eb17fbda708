"""Row 1: relative L2 error against f64 over the dequantised K and V, 1 to 128K keys."""

from __future__ import annotations

from typing import Final

import numpy as np
from numpy.typing import NDArray

from ollama_tiering.bench.attention.rig import (
    FLASH,
    PLAIN,
    Rig,
    checked_queries,
    heads,
    run_ours,
)
from ollama_tiering.bench.attention.sides import ggml
from ollama_tiering.bench.tiers.results import Ratio, Section
from ollama_tiering.kernels.samples import (
    DIFFUSE,
    PEAKED,
    SHARP,
    Problem,
    Sample,
    exact,
    make,
    relative_error,
    with_rounded_logits,
)
from ollama_tiering.kernels.shape import Dtype

BOUND: Final = 1e-5
KEYS: Final = (1, 100, 1024, 8192, 65536, 131072)
DTYPES: Final = (Dtype.F16, Dtype.BF16, Dtype.Q8_0, Dtype.Q4_0)
LOGITS: Final = {"diffuse": DIFFUSE, "sharp": SHARP, "peaked": PEAKED}
ROUNDED: Final = "f64 with logits rounded to f32"
_PREFILL_QUERIES: Final = 64
_OTHERS_FROM_KEYS: Final = 1024


def measure(rig: Rig) -> Section:
    ratios = []
    for n_cells in sorted({rig.keys(keys) for keys in KEYS}):
        for logits, deviation in LOGITS.items():
            rig.say(f"accuracy, {n_cells:,} keys, {logits}")
            ratios += _ratios(rig, n_cells, logits, deviation)
    notes = [
        f"{heads(_problem(1, 1, Dtype.F16, DIFFUSE))}, D 128, V with mean 0.3, causal. Against an "
        "f64 loop over the dequantised K and V. Ours: the worst of the data types, for the last "
        f"query alone (decode) and for the last {_PREFILL_QUERIES} (prefill).",
        f"Logits of deviation {DIFFUSE:g} (diffuse), {SHARP:g} (sharp), {PEAKED:g} (peaked).",
        f"ggml, and {ROUNDED}: the last query alone, in f16. The latter is what is lost "
        "by rounding each logit once and nothing else: a logit of 1,000 in f32 is off by 3e-5, and "
        "so is its weight. It shows where two keys share the weight.",
        *rig.notes(),
    ]
    title, axis = "Error against f64", "relative L2 error, logarithmic"
    return Section("accuracy", title, axis, ratios, notes, log_axis=True)


def _ratios(rig: Rig, n_cells: int, logits: str, deviation: float) -> list[Ratio]:
    errors: dict[Dtype, float] = {}
    others: dict[str, float] = {}
    for dtype in DTYPES:
        for n_q in sorted({1, min(_PREFILL_QUERIES, n_cells)}):
            sample = make(_problem(n_cells, n_q, dtype, deviation))
            queries = checked_queries(n_q)
            right = exact(sample, queries)
            error = relative_error(run_ours(rig, sample)[queries], right)
            errors[dtype] = float(np.maximum(error, errors.get(dtype, error)))
            if dtype is Dtype.F16 and n_q == 1 and n_cells >= _OTHERS_FROM_KEYS:
                others = _ggml_errors(rig, sample, right)
                others[ROUNDED] = relative_error(with_rounded_logits(sample, 0), right)
    what = f"{n_cells:,} {'key' if n_cells == 1 else 'keys'}, {logits}"
    each = ", ".join(f"{dtype.name.lower()} {error:.1e}" for dtype, error in errors.items())
    ours = Ratio(
        f"{what}, ours", each, "f64", float(np.max(list(errors.values()))), BOUND, at_most=True
    )
    return [
        ours,
        *(
            Ratio(f"{what}, {side}", f"f16 {error:.1e}", "f64", error)
            for side, error in others.items()
        ),
    ]


def _ggml_errors(rig: Rig, sample: Sample, right: NDArray[np.float64]) -> dict[str, float]:
    if rig.ggml_program is None:
        return {}
    errors = {}
    with ggml(rig.ggml_program, sample, rig.threads) as theirs:
        for side, flash in ((FLASH, True), (PLAIN, False)):
            theirs.turn(flash=flash, repeats=1)
            errors[side] = relative_error(theirs.out, right)
    return errors


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
