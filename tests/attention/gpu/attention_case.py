"""Attention problems on a GPU, and their answer by numpy in f64."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
from gguf import GGMLQuantizationType
from gguf.quants import dequantize, quantize

from ollama_tiering.kernels.gpu import GpuRows
from ollama_tiering.kernels.gpu_device import GpuArray, GpuDevice
from ollama_tiering.kernels.shape import Dtype, Shape

QUANTISED = {"q8_0": GGMLQuantizationType.Q8_0, "q4_0": GGMLQuantizationType.Q4_0}
BOUND = 1e-4


def to_rows(x: np.ndarray, dtype: str) -> tuple[np.ndarray, np.ndarray]:
    """Bytes [n_cells, n_kv_head, row] and the values they hold."""
    if dtype == "f16":
        half = x.astype(np.float16)
        return half.view(np.uint8), half.astype(np.float64)
    if dtype == "bf16":
        bits = (x.view(np.uint32) >> 16).astype(np.uint16)
        return bits.view(np.uint8), (bits.astype(np.uint32) << 16).view(np.float32).astype(float)
    packed = quantize(x, QUANTISED[dtype])
    return packed, dequantize(packed, QUANTISED[dtype]).astype(np.float64)


def on_gpu(device: GpuDevice, packed: np.ndarray, page_cells: int) -> GpuRows:
    """In pages; what is beyond the last cell is no number."""
    pages = []
    for first in range(0, len(packed), page_cells):
        page = np.full((page_cells, *packed.shape[1:]), 0xFF, np.uint8)
        part = packed[first : first + page_cells]
        page[: len(part)] = part
        pages.append(page)
    return GpuRows.of_pages(device, pages)


def f64(
    q: np.ndarray,
    k: np.ndarray,
    v: np.ndarray,
    seen: np.ndarray,
    sinks: Any = None,
    bias: np.ndarray | None = None,
) -> np.ndarray:
    """seen: bool [n_q, n_cells]; bias: added to logits, likewise."""
    group = q.shape[1] // k.shape[1]
    k, v = np.repeat(k, group, 1), np.repeat(v, group, 1)
    s = np.einsum("qhd,chd->hqc", q.astype(np.float64), k) / np.sqrt(q.shape[2])
    if bias is not None:
        s = s + bias[None]
    s = np.where(seen[None], s, -np.inf)
    sink = np.full((q.shape[1], 1, 1), -np.inf) if sinks is None else sinks[:, None, None]
    m = np.maximum(np.maximum(s.max(2, keepdims=True), sink), -1e300)
    w = np.exp(s - m)
    total = w.sum(2, keepdims=True) + np.exp(sink - m)
    return np.einsum("hqc,chd->qhd", w / np.where(total > 0, total, 1), v)


def error(got: GpuArray, wanted: np.ndarray) -> float:
    difference = np.linalg.norm(got.numpy() - wanted)
    return float(difference / max(np.linalg.norm(wanted), 1e-30))


@dataclass
class Small:
    """64 values a head, 5 heads of a group: an instance that the emulation has, too."""

    k_type: str = "f16"
    n_q: int = 2
    n_cells: int = 200
    n_kv_head: int = 2
    seed: int = 5

    def __post_init__(self) -> None:
        random = np.random.default_rng(self.seed)
        heads = self.n_kv_head
        self.q = random.standard_normal((self.n_q, 5 * heads, 64), np.float32)
        keys = random.standard_normal((self.n_cells, heads, 64), np.float32)
        values = random.standard_normal((self.n_cells, heads, 64), np.float32) + np.float32(0.3)
        self.k, self.k_values = to_rows(keys, self.k_type)
        self.v, self.v_values = to_rows(values, "f16")

    @property
    def align(self) -> int:
        return 4 if self.k_type in QUANTISED else 16

    @property
    def shape(self) -> Shape:
        types = (Dtype[self.k_type.upper()], Dtype.F16)
        heads = self.n_kv_head
        return Shape(5 * heads, heads, 64, 64, self.n_q, self.n_cells, *types)

    def everything(self) -> np.ndarray:
        return np.ones((self.n_q, self.n_cells), bool)

    def answer(self, seen: np.ndarray, **more: Any) -> np.ndarray:
        return f64(self.q, self.k_values, self.v_values, seen, **more)
