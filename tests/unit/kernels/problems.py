"""Random attention problems for the tests of the Python interface."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from ollama_tiering.kernels import Dtype, Rows, Shape


@dataclass(frozen=True)
class Problem:
    shape: Shape
    q: NDArray[np.float32]
    k: Rows
    v: Rows


def problem(
    *,
    n_q: int = 1,
    n_cells: int = 100,
    n_head: int = 4,
    n_kv_head: int = 2,
    d_k: int = 64,
    d_v: int = 64,
    k_type: Dtype = Dtype.F16,
    v_type: Dtype = Dtype.F16,
    page_cells: int = 32,
    deviation: float = 1.0,
    softcap: float = 0.0,
    seed: int = 1,
) -> Problem:
    """Pages in shuffled order; V has a mean of 0.3, so that errors of the sum show."""
    random = np.random.default_rng(seed)

    def rows(d: int, dtype: Dtype, mean: float) -> Rows:
        values = random.normal(mean, 1.0, (n_cells, n_kv_head, d)).astype(np.float32)
        order = random.permutation(-(-n_cells // page_cells))
        return Rows.of_values(values, dtype, page_cells=page_cells, order=order)

    return Problem(
        Shape(n_head, n_kv_head, d_k, d_v, n_q, n_cells, k_type, v_type, softcap=softcap),
        random.normal(0.0, deviation, (n_q, n_head, d_k)).astype(np.float32),
        rows(d_k, k_type, 0.0),
        rows(d_v, v_type, 0.3),
    )


def error(out: NDArray[np.float32] | NDArray[np.float64], expected: NDArray[np.float64]) -> float:
    """Relative L2."""
    return float(np.linalg.norm(out - expected) / max(float(np.linalg.norm(expected)), 1e-300))
