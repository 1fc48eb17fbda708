"""Attention in numpy and f64, written down from its definition: the second opinion beside the C++
reference.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from ollama_tiering.kernels.mask import Mask
from ollama_tiering.kernels.quantise import dequantise
from ollama_tiering.kernels.rows import Rows
from ollama_tiering.kernels.shape import Shape


def reference_numpy(
    shape: Shape,
    q: NDArray[np.float32],
    k: Rows,
    v: Rows,
    *,
    n_cells: int | None = None,
    mask: Mask | None = None,
    sinks: NDArray[np.float32] | None = None,
) -> NDArray[np.float64]:
    """q [n_q, n_head, d_k] -> [n_q, n_head, d_v]. One head of all queries at a time."""
    n_q = q.shape[0]
    n_cells = k.n_cells if n_cells is None else n_cells
    keys, values = _values(k, n_cells), _values(v, n_cells)
    bias = np.zeros((n_q, n_cells)) if mask is None else mask.bias(n_q, n_cells)
    scale, softcap = (
        np.float64(np.float32(shape.logit_scale)),
        np.float64(np.float32(shape.softcap)),
    )
    group = shape.n_head // shape.n_kv_head
    out = np.zeros((n_q, shape.n_head, shape.d_v))
    for head in range(shape.n_head):
        logits = scale * (q[:, head].astype(np.float64) @ keys[:, head // group].T)
        if softcap:
            logits = softcap * np.tanh(logits / softcap)
        logits = logits + bias
        if sinks is not None:  # one more cell, whose value is 0
            sink = np.full((n_q, 1), sinks[head], np.float64)
            logits = np.concatenate([logits, sink], axis=1)
        out[:, head] = _softmax(logits)[:, :n_cells] @ values[:, head // group]
    return out


def _values(rows: Rows, n_cells: int) -> NDArray[np.float64]:
    return dequantise(rows.cells(n_cells), rows.dtype).astype(np.float64)


def _softmax(logits: NDArray[np.float64]) -> NDArray[np.float64]:
    """Over the last axis; 0 where nothing is seen."""
    largest = logits.max(axis=1, keepdims=True, initial=-np.inf)
    weights = np.exp(logits - np.where(np.isneginf(largest), 0.0, largest))
    total = weights.sum(axis=1, keepdims=True)
    share: NDArray[np.float64] = np.zeros_like(weights)
    np.divide(weights, total, out=share, where=total > 0)
    return share
