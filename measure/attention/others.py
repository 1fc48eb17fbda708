"""What samples of attention are compared with: the same on rows in a core's cache, and in f64 with
logits in f32.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Final

import numpy as np
from numpy.typing import NDArray

from ollama_tiering.kernels.quantise import dequantise
from ollama_tiering.kernels.rows import Rows
from ollama_tiering.kernels.samples import Sample

PEAKED: Final = 300.0  # one key has nearly all weight, that of others is denormal or 0
_CACHED_CELLS: Final = 32  # 128 KB of K and V with 8 heads of 128 values in f16


def in_cache(sample: Sample) -> Sample:
    """The same work on K and V that stay in a core's cache: the page table names one page of a few
    cells again and again. The result differs.
    """
    n_cells = sample.problem.n_cells
    cells = min(_CACHED_CELLS, n_cells)

    def repeated(rows: Rows) -> Rows:
        page = rows.cells(cells)[np.newaxis]
        return Rows(page, rows.dtype, np.zeros(-(-n_cells // cells), np.int64))

    return replace(sample, k=repeated(sample.k), v=repeated(sample.v))


def with_rounded_logits(sample: Sample, queries: Sequence[int]) -> NDArray[np.float64]:
    """As `exact`, but each logit is rounded to f32 once. No kernel with f32 logits can be expected
    to be better than this, and where logits are large the error is large. Without window, soft-cap
    and sinks.
    """
    problem = sample.problem
    group = problem.n_head // problem.n_kv_head
    out = np.empty((len(queries), problem.n_head, problem.d_v))
    keys, values = sample.k.cells(problem.n_cells), sample.v.cells(problem.n_cells)
    for kv_head in range(problem.n_kv_head):
        k = dequantise(keys[:, kv_head], problem.k_type).astype(np.float64)
        v = dequantise(values[:, kv_head], problem.v_type).astype(np.float64)
        heads = slice(kv_head * group, (kv_head + 1) * group)
        for row, query in enumerate(queries):
            seen = problem.n_cells - problem.n_q + query + 1
            q = sample.q[query, heads].astype(np.float64)
            logits = problem.shape.logit_scale * (q @ k[:seen].T)
            rounded = logits.astype(np.float32).astype(np.float64)
            weights = np.exp(rounded - rounded.max(axis=1, keepdims=True))
            out[row, heads] = weights @ v[:seen] / weights.sum(axis=1, keepdims=True)
    return out
