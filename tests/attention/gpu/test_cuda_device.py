"""The kernels on a GPU against numpy's f64, and what they reach. `pytest -m gpu` where one is."""

from __future__ import annotations

import numpy as np
import pytest

from ollama_tiering.kernels import check, check_gpu, gpu_bench
from ollama_tiering.kernels.gpu import GpuAttention
from ollama_tiering.kernels.gpu_bench import BoundedRatio
from ollama_tiering.kernels.gpu_device import GpuDevice
from ollama_tiering.kernels.gpu_ring import ColdRun, GpuRing
from ollama_tiering.kernels.shape import Dtype, Shape
from tests.attention.gpu.attention_case import BOUND, QUANTISED, error, f64, on_gpu, to_rows

pytestmark = [pytest.mark.gpu, pytest.mark.timeout(600)]

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
    with GpuAttention(shape, device, n_slots=64, align=align) as attention:
        got, again = (
            attention.run(
                device.upload(q),
                on_gpu(device, k, 96),
                on_gpu(device, v, 96),
                n_cells,
                device.upload(sinks),
                cell_pos=device.upload(cell_pos),
                query_pos=device.upload(query_pos),
            )
            for _ in range(2)
        )
        assert np.array_equal(got.numpy(), again.numpy()), "the same input, other bits"
        seen = cell_pos[None] <= query_pos[:, None]
        assert error(got, f64(q, k_values, v_values, seen, sinks)) <= BOUND


@pytest.mark.parametrize("deviation", [1.0, 300.0])
def test_long_context_diffuse_and_peaked(device: GpuDevice, deviation: float) -> None:
    random = np.random.default_rng(2)
    n_cells = 131072
    q = random.standard_normal((1, 5, 128), np.float32) * np.float32(deviation)
    k, k_values = to_rows(random.standard_normal((n_cells, 1, 128), np.float32), "f16")
    v, v_values = to_rows(
        random.standard_normal((n_cells, 1, 128), np.float32) + np.float32(0.3), "f16"
    )
    with GpuAttention(Shape(5, 1, 128, 128, 1, n_cells), device, n_slots=256) as a:
        got = a.run(device.upload(q), on_gpu(device, k, 256), on_gpu(device, v, 256), n_cells)
        seen = np.ones((1, n_cells), bool)
        assert error(got, f64(q, k_values, v_values, seen)) <= BOUND


@pytest.mark.parametrize("n_q", [1, 3, 20])  # decode, narrow, wide
def test_a_sink_above_a_long_tail(device: GpuDevice, n_q: int) -> None:
    """One logit 17 nats above 128K others, its V small: the output is the tail's."""
    random = np.random.default_rng(4)
    n_cells = 131072
    q = random.standard_normal((n_q, 5, 128), np.float32)
    keys = random.standard_normal((n_cells, 1, 128), np.float32)
    values = random.standard_normal((n_cells, 1, 128), np.float32) + np.float32(0.3)
    q[:, :, 0], keys[:, :, 0] = 8.0, 0.0
    keys[0], values[0] = 0.0, values[0] * np.float32(0.05)
    keys[0, :, 0] = 17.0 * np.sqrt(128) / 8.0
    k, k_values = to_rows(keys, "f16")
    v, v_values = to_rows(values, "f16")
    with GpuAttention(Shape(5, 1, 128, 128, n_q, n_cells), device, n_slots=64) as a:
        got = a.run(device.upload(q), on_gpu(device, k, 256), on_gpu(device, v, 256), n_cells)
        seen = np.ones((n_q, n_cells), bool)
        assert error(got, f64(q, k_values, v_values, seen)) <= BOUND


def test_cold_runs_through_the_ring(device: GpuDevice) -> None:
    random = np.random.default_rng(3)
    piece_cells, n_pieces, heads = 64, 11, 2
    n_cells, k_bytes = piece_cells * n_pieces, 64 * 2 * 256
    q = random.standard_normal((3, 10, 128), np.float32)
    k, k_values = to_rows(random.standard_normal((n_cells, heads, 128), np.float32), "f16")
    v, v_values = to_rows(random.standard_normal((n_cells, heads, 128), np.float32), "f16")
    runs = []
    for i in range(n_pieces):
        memory = device.pinned(2 * k_bytes)
        memory.bytes[:k_bytes] = k[i * piece_cells : (i + 1) * piece_cells].ravel()
        memory.bytes[k_bytes:] = v[i * piece_cells : (i + 1) * piece_cells].ravel()
        runs.append(ColdRun(memory, piece_cells, k_bytes, 2 * k_bytes))
    shape = Shape(10, heads, 128, 128, 3, piece_cells)
    with (
        GpuRing(device, 3, 2 * k_bytes) as ring,
        GpuAttention(shape, device, n_slots=n_pieces) as attention,
    ):
        rows = ring.rows(runs, 256, heads)
        device_q = device.upload(q)
        for _ in range(3):
            ring.deliver(runs, lambda i: attention.attend(device_q, *rows[i], piece_cells, first=i))
        got = attention.combine(3, n_pieces)
        seen = np.ones((3, n_cells), bool)
        assert error(got, f64(q, k_values, v_values, seen)) <= BOUND


def held(ratios: list[BoundedRatio]) -> None:
    for ratio in ratios:
        print(f"{ratio.name}: {ratio.value:.3f} (bound {ratio.bound})")
    assert [r.name for r in ratios if not r.holds] == []


@pytest.mark.parametrize("n_cells", [8192, 32768, 131072])
@pytest.mark.parametrize("group", [1, 4, 5, 8])
def test_bandwidth_of_hot_decode(device: GpuDevice, group: int, n_cells: int) -> None:
    sizes = gpu_bench.fitting(device, gpu_bench.Sizes())
    held([gpu_bench.hot_decode(device, sizes, group, n_cells)])


def test_bandwidth_of_cold_pages(device: GpuDevice) -> None:
    sizes = gpu_bench.fitting(device, gpu_bench.Sizes())
    ratios = gpu_bench.cold_decode(device, sizes, 5, 16384)
    held([*ratios, gpu_bench.cold_prefill(device, sizes, 5, 16384)])


def test_kernel_check_finds_nothing_wrong(device: GpuDevice) -> None:
    rows = list(check.check([check_gpu.Gpu(device)]))
    assert len(rows) == len(check.PROBLEMS)
    assert [row for row in rows if not row.ok] == []
