"""The kernels on a GPU against numpy's f64, and what they reach. `pytest -m gpu` where one is."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
from gguf import GGMLQuantizationType
from gguf.quants import dequantize, quantize

from ollama_tiering.errors import TieringError
from ollama_tiering.kernels import check, check_gpu, gpu, gpu_bench
from ollama_tiering.kernels.gpu import GpuAttention, GpuDevice, GpuRows
from ollama_tiering.kernels.gpu_ring import ColdRun, GpuRing, staged_rows
from ollama_tiering.kernels.shape import Dtype, Shape

pytestmark = [pytest.mark.gpu, pytest.mark.timeout(600)]
QUANTISED = {"q8_0": GGMLQuantizationType.Q8_0, "q4_0": GGMLQuantizationType.Q4_0}
BOUND = 1e-4


@pytest.fixture(scope="module")
def device() -> Iterator[GpuDevice]:
    try:
        gpu.cupy()
        opened = GpuDevice()
    except TieringError as error:
        pytest.skip(error.message)
    yield opened
    opened.close()


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


def on_gpu(packed: np.ndarray, page_cells: int) -> GpuRows:
    """Pages in an order of their own."""
    xp = gpu.cupy()
    n_cells, _, row_bytes = packed.shape
    pages = []
    for first in range(0, n_cells, page_cells):
        page = np.full((page_cells, *packed.shape[1:]), 0xFF, np.uint8)
        page[: min(page_cells, n_cells - first)] = packed[first : first + page_cells]
        pages.append(xp.asarray(page))
    return GpuRows.of_pages(pages, page_cells, packed.shape[1] * row_bytes, row_bytes)


def f64(q: np.ndarray, k: np.ndarray, v: np.ndarray, seen: np.ndarray, sinks: Any) -> np.ndarray:
    group = q.shape[1] // k.shape[1]
    k, v = np.repeat(k, group, 1), np.repeat(v, group, 1)
    s = np.einsum("qhd,chd->hqc", q.astype(np.float64), k) / np.sqrt(q.shape[2])
    s = np.where(seen[None], s, -np.inf)
    sink = np.full((q.shape[1], 1, 1), -np.inf) if sinks is None else sinks[:, None, None]
    m = np.maximum(np.maximum(s.max(2, keepdims=True), sink), -1e300)
    w = np.exp(s - m)
    total = w.sum(2, keepdims=True) + np.exp(sink - m)
    return np.einsum("hqc,chd->qhd", w / np.where(total > 0, total, 1), v)


def error(got: Any, wanted: np.ndarray) -> float:
    difference = np.linalg.norm(gpu.cupy().asnumpy(got) - wanted)
    return float(difference / max(np.linalg.norm(wanted), 1e-30))


CASES = [
    (k_type, v_type, d_k, d_v, group, n_q)
    for k_type, v_type in [("f16", "f16"), ("bf16", "bf16"), ("q8_0", "q4_0"), ("q4_0", "q8_0")]
    for d_k, d_v in [(64, 64), (128, 128), (256, 256)]
    for group, n_q in [(1, 1), (5, 1), (8, 2), (16, 1), (5, 40)]
] + [
    ("f16", "f16", 80, 80, 3, 1),
    ("f16", "f16", 112, 112, 7, 33),
    ("q8_0", "q8_0", 96, 96, 2, 5),
    ("f16", "q8_0", 192, 128, 6, 7),
    ("f16", "f16", 576, 512, 16, 1),
    ("f16", "f16", 576, 512, 16, 9),
]


@pytest.mark.parametrize(("k_type", "v_type", "d_k", "d_v", "group", "n_q"), CASES)
def test_agrees_with_f64(
    device: GpuDevice, k_type: str, v_type: str, d_k: int, d_v: int, group: int, n_q: int
) -> None:
    xp = gpu.cupy()
    random = np.random.default_rng(1)
    n_kv_head, n_cells = 2, 1500
    q = random.standard_normal((n_q, n_kv_head * group, d_k), np.float32)
    k, k_values = to_rows(random.standard_normal((n_cells, n_kv_head, d_k), np.float32), k_type)
    v, v_values = to_rows(
        random.standard_normal((n_cells, n_kv_head, d_v), np.float32) + np.float32(0.3), v_type
    )
    cell_pos = random.permutation(n_cells).astype(np.int32)
    query_pos = np.sort(random.integers(0, n_cells, n_q)).astype(np.int32)
    sinks = random.standard_normal(n_kv_head * group).astype(np.float32)
    quantised = k_type in QUANTISED or v_type in QUANTISED
    align = 16 if not quantised else 2 if 96 in (d_k, d_v) else 4
    types = (Dtype[k_type.upper()], Dtype[v_type.upper()])
    shape = Shape(n_kv_head * group, n_kv_head, d_k, d_v, n_q, n_cells, *types)
    with GpuAttention(shape, n_slots=64, align=align, device=device) as attention:
        got, again = (
            attention.run(
                xp.asarray(q),
                on_gpu(k, 96),
                on_gpu(v, 96),
                n_cells,
                xp.asarray(sinks),
                cell_pos=xp.asarray(cell_pos),
                query_pos=xp.asarray(query_pos),
            )
            for _ in range(2)
        )
        assert bool((got == again).all()), "the same input, other bits"
    seen = cell_pos[None] <= query_pos[:, None]
    assert error(got, f64(q, k_values, v_values, seen, sinks)) <= BOUND


@pytest.mark.parametrize("deviation", [1.0, 300.0])
def test_long_context_diffuse_and_peaked(device: GpuDevice, deviation: float) -> None:
    xp = gpu.cupy()
    random = np.random.default_rng(2)
    n_cells = 131072
    q = random.standard_normal((1, 5, 128), np.float32) * np.float32(deviation)
    k, k_values = to_rows(random.standard_normal((n_cells, 1, 128), np.float32), "f16")
    v, v_values = to_rows(
        random.standard_normal((n_cells, 1, 128), np.float32) + np.float32(0.3), "f16"
    )
    with GpuAttention(Shape(5, 1, 128, 128, 1, n_cells), n_slots=256, device=device) as a:
        got = a.run(xp.asarray(q), on_gpu(k, 256), on_gpu(v, 256), n_cells)
    seen = np.ones((1, n_cells), bool)
    assert error(got, f64(q, k_values, v_values, seen, None)) <= BOUND


def test_cold_runs_through_the_ring(device: GpuDevice) -> None:
    xp = gpu.cupy()
    random = np.random.default_rng(3)
    piece_cells, n_pieces, heads = 64, 11, 2
    row_bytes, k_bytes = 256, 64 * 2 * 256
    q = random.standard_normal((3, 10, 128), np.float32)
    k, k_values = to_rows(
        random.standard_normal((piece_cells * n_pieces, heads, 128), np.float32), "f16"
    )
    v, v_values = to_rows(
        random.standard_normal((piece_cells * n_pieces, heads, 128), np.float32), "f16"
    )
    runs = []
    for i in range(n_pieces):
        memory = xp.cuda.alloc_pinned_memory(2 * k_bytes)
        both = np.frombuffer(memory, np.uint8, 2 * k_bytes)
        both[:k_bytes] = k[i * piece_cells : (i + 1) * piece_cells].ravel()
        both[k_bytes:] = v[i * piece_cells : (i + 1) * piece_cells].ravel()
        runs.append(ColdRun(memory, piece_cells, k_bytes, 2 * k_bytes))
    ring = GpuRing(device, 3, 2 * k_bytes)
    shape = Shape(10, heads, 128, 128, 3, piece_cells)
    with GpuAttention(shape, n_slots=n_pieces, device=device) as attention:
        tables = ring.tables(runs)
        device_q = xp.asarray(q)

        def use(i: int) -> None:
            k_rows, v_rows = (
                staged_rows(table, piece_cells, heads, row_bytes) for table in tables[i]
            )
            attention.attend(device_q, k_rows, v_rows, piece_cells, first=i)

        for _ in range(3):
            ring.deliver(runs, use)
        got = attention.combine(3, n_pieces)
        ring.close()
    seen = np.ones((3, piece_cells * n_pieces), bool)
    assert error(got, f64(q, k_values, v_values, seen, None)) <= BOUND


def test_bandwidth_bounds(device: GpuDevice) -> None:
    ratios = gpu_bench.all_ratios()
    for ratio in ratios:
        print(f"{ratio.name}: {ratio.value:.3f} (bound {ratio.bound})")
    assert [r.name for r in ratios if not r.holds] == []


def test_kernel_check_finds_nothing_wrong(device: GpuDevice) -> None:
    rows = list(check.check([check_gpu.Gpu()]))
    assert len(rows) == len(check.PROBLEMS)
    assert [row for row in rows if not row.ok] == []
