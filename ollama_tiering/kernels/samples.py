"""Attention problems made from a seed: what is asked, and q, K and V for it.

A problem is the end of one sequence: `n_cells` positions are in the cache, the last `n_q` of them
are the queries, run in batches. V has a mean that is not zero, because a sum of values that cancel
hides an accumulator's rounding.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Final

import numpy as np
from numpy.typing import NDArray

from ollama_tiering.kernels.cpu import reference
from ollama_tiering.kernels.mask import PositionMask
from ollama_tiering.kernels.quantise import quantise
from ollama_tiering.kernels.rows import Rows
from ollama_tiering.kernels.shape import Dtype, Shape

DIFFUSE: Final = 1.0  # deviation of the queries: logits of deviation 1, every key has weight
SHARP: Final = 40.0  # a few keys have the weight

_AT_ONCE_CELLS: Final = 8192  # made in f32 at a time


@dataclass(frozen=True, slots=True)
class Problem:
    """`page_cells` None: one page; else the pages lie in a shuffled order. `window` and `softcap`
    0: none.
    """

    n_head: int
    n_kv_head: int
    d_k: int
    d_v: int
    n_cells: int
    n_q: int = 1
    batch: int = 512
    k_type: Dtype = Dtype.F16
    v_type: Dtype = Dtype.F16
    query_deviation: float = DIFFUSE
    v_mean: float = 0.3
    window: int = 0
    softcap: float = 0.0
    sinks: bool = False
    page_cells: int | None = None
    seed: int = 1

    @property
    def shape(self) -> Shape:
        return Shape(
            self.n_head,
            self.n_kv_head,
            self.d_k,
            self.d_v,
            max_q=min(self.n_q, self.batch),
            max_cells=self.n_cells,
            k_type=self.k_type,
            v_type=self.v_type,
            softcap=self.softcap,
        )

    @property
    def flops(self) -> int:
        """Multiplications and additions of q . k and p v, of the pairs a causal mask leaves."""
        first = self.n_cells - self.n_q + 1
        pairs = (first + self.n_cells) * self.n_q // 2
        return 2 * (self.d_k + self.d_v) * self.n_head * pairs

    @property
    def kv_bytes(self) -> int:
        """Bytes of K and V, each read once."""
        row_bytes = self.k_type.row_bytes(self.d_k) + self.v_type.row_bytes(self.d_v)
        return self.n_cells * self.n_kv_head * row_bytes

    def batches(self) -> Iterator[tuple[slice, int]]:
        """Queries, and how many cells are in the cache when they run."""
        for first in range(0, self.n_q, self.batch):
            end = min(first + self.batch, self.n_q)
            yield slice(first, end), self.n_cells - self.n_q + end


@dataclass(frozen=True, slots=True)
class Sample:
    """q f32 [n_q, n_head, d_k]; sinks f32 [n_head] or None."""

    problem: Problem
    q: NDArray[np.float32]
    k: Rows
    v: Rows
    sinks: NDArray[np.float32] | None

    def mask(self, queries: slice, n_cells: int) -> PositionMask | None:
        """Is None if every query of the batch sees every cell."""
        count = queries.stop - queries.start
        if count == 1 and not self.problem.window:
            return None
        return PositionMask.causal(count, n_cells, window=self.problem.window)


def make(problem: Problem) -> Sample:
    rng = np.random.default_rng(problem.seed)
    axes = (problem.n_q, problem.n_head, problem.d_k)
    q = rng.standard_normal(axes, np.float32) * np.float32(problem.query_deviation)
    k = _rows(rng, problem, problem.d_k, problem.k_type, mean=0.0)
    v = _rows(rng, problem, problem.d_v, problem.v_type, mean=problem.v_mean)
    sinks = rng.standard_normal(problem.n_head, np.float32) if problem.sinks else None
    return Sample(problem, q, k, v, sinks)


def exact(sample: Sample, queries: Sequence[int]) -> NDArray[np.float64]:
    """Computes in f64, one query after another: [len(queries), n_head, d_v]."""
    first_cells = sample.problem.n_cells - sample.problem.n_q + 1
    parts = []
    for query in queries:
        one = slice(query, query + 1)
        parts.append(
            reference(
                sample.problem.shape,
                sample.q[one],
                sample.k,
                sample.v,
                n_cells=first_cells + query,
                mask=sample.mask(one, first_cells + query),
                sinks=sample.sinks,
            )
        )
    return np.concatenate(parts)


def relative_error(
    out: NDArray[np.float32] | NDArray[np.float64], exact: NDArray[np.float64]
) -> float:
    """L2 norm of the difference ÷ L2 norm of the exact result; NaN if `out` has a NaN."""
    difference, size = float(np.linalg.norm(out - exact)), float(np.linalg.norm(exact))
    return difference / size if size else difference


def _rows(
    rng: np.random.Generator, problem: Problem, values: int, dtype: Dtype, *, mean: float
) -> Rows:
    page_cells = problem.page_cells or problem.n_cells
    n_pages = -(-problem.n_cells // page_cells)
    cells = np.zeros((n_pages * page_cells, problem.n_kv_head, dtype.row_bytes(values)), np.uint8)
    for first in range(0, problem.n_cells, _AT_ONCE_CELLS):
        part = cells[first : min(first + _AT_ONCE_CELLS, problem.n_cells)]
        made = rng.standard_normal((len(part), problem.n_kv_head, values), np.float32)
        part[:] = quantise(made + np.float32(mean), dtype)
    pages = cells.reshape(n_pages, page_cells, *cells.shape[1:])
    if problem.page_cells is None:
        return Rows(pages, dtype)
    table = rng.permutation(n_pages)
    shuffled = np.empty_like(pages)
    shuffled[table] = pages
    return Rows(shuffled, dtype, table)
