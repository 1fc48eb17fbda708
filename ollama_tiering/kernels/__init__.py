"""Exact attention over paged K/V, from Python: the CPU library through ctypes, numpy in and out.

    shape = Shape(n_head=16, n_kv_head=8, d_k=128, d_v=128, max_q=512, max_cells=8192)
    k = Rows.of_values(k_values, shape.k_type)        # f32 [n_cells, n_kv_head, d_k]
    with CpuAttention(shape, threads=2) as attention:
        out = attention.run(q, k, v, mask=PositionMask.causal(n_q, n_cells))

The library is found or built at the first use, not at import.
"""

from ollama_tiering.kernels.binding import PaError, PaStatus
from ollama_tiering.kernels.cpu import CpuAttention, State, finish, merge, reference
from ollama_tiering.kernels.library import library_path
from ollama_tiering.kernels.mask import DenseMask, Mask, PositionMask
from ollama_tiering.kernels.quantise import dequantise, quantise
from ollama_tiering.kernels.rows import Rows
from ollama_tiering.kernels.shape import Dtype, Shape

__all__ = [
    "CpuAttention",
    "DenseMask",
    "Dtype",
    "Mask",
    "PaError",
    "PaStatus",
    "PositionMask",
    "Rows",
    "Shape",
    "State",
    "dequantise",
    "finish",
    "library_path",
    "merge",
    "quantise",
    "reference",
]
