"""Every way to ask for attention, small enough for the emulation: masks, joins, states of the CPU,
the ring cancelled, streams. On a GPU `pytest -m gpu tests/attention/gpu`; here under
fake_libcuda.cpp (tests/unit/kernels/test_cuda_fake.py).
"""

from __future__ import annotations

import numpy as np
import pytest

from ollama_tiering.kernels import cuda_binding as binding
from ollama_tiering.kernels import cuda_driver
from ollama_tiering.kernels.binding import PaError, PaStatus
from ollama_tiering.kernels.gpu import GpuAttention, GpuRows
from ollama_tiering.kernels.gpu_device import GpuDevice
from ollama_tiering.kernels.gpu_ring import ColdRun, GpuRing
from tests.attention.gpu.attention_case import BOUND, Small, error, on_gpu

pytestmark = [pytest.mark.gpu, pytest.mark.timeout(600)]


@pytest.mark.parametrize("k_type", ["f16", "q8_0"])  # q8_0: rows at multiples of 4 bytes
@pytest.mark.parametrize("n_q", [1, 3, 9])  # decode, narrow, wide
def test_positions_and_a_window(device: GpuDevice, k_type: str, n_q: int) -> None:
    case = Small(k_type, n_q=n_q)
    random = np.random.default_rng(1)
    cell_pos = random.permutation(case.n_cells).astype(np.int32)
    query_pos = np.arange(case.n_cells - n_q, case.n_cells, dtype=np.int32)
    with GpuAttention(case.shape, device, n_slots=8, align=case.align) as attention:
        got = attention.run(
            device.upload(case.q),
            on_gpu(device, case.k, 32),
            on_gpu(device, case.v, 32),
            case.n_cells,
            cell_pos=device.upload(cell_pos),
            query_pos=device.upload(query_pos),
            window=50,
        )
        far = query_pos[:, None] - cell_pos[None]
        assert error(got, case.answer((far >= 0) & (far < 50))) <= BOUND


def test_a_dense_mask(device: GpuDevice) -> None:
    case = Small(n_q=3)
    random = np.random.default_rng(2)
    bias = random.standard_normal((3, case.n_cells)).astype(np.float16)
    seen = random.random((3, case.n_cells)) < 0.6
    dense = np.where(seen, bias, np.float16(-np.inf)).astype(np.float16)
    with GpuAttention(case.shape, device, n_slots=8) as attention:
        got = attention.run(
            device.upload(case.q),
            on_gpu(device, case.k, 64),
            on_gpu(device, case.v, 64),
            case.n_cells,
            dense=device.upload(dense),
        )
        assert error(got, case.answer(seen, bias=bias.astype(np.float64))) <= BOUND


def test_several_conversations_and_sinks(device: GpuDevice) -> None:
    case = Small(n_q=4)
    cell_seq = (np.arange(case.n_cells) // 30 % 3).astype(np.int32)
    cell_pos = np.arange(case.n_cells, dtype=np.int32)
    cell_pos[::7] = -1  # empty
    query_pos = np.array([199, 150, 199, 20], np.int32)
    query_seq = np.array([0, 1, 2, 0], np.int32)
    sinks = np.linspace(-1, 3, 10, dtype=np.float32)
    with GpuAttention(case.shape, device, n_slots=8) as attention:
        got = attention.run(
            device.upload(case.q),
            on_gpu(device, case.k, 50),
            on_gpu(device, case.v, 50),
            case.n_cells,
            device.upload(sinks),
            cell_pos=device.upload(cell_pos),
            cell_seq=device.upload(cell_seq),
            query_pos=device.upload(query_pos),
            query_seq=device.upload(query_seq),
        )
        seen = (cell_pos >= 0) & (cell_pos <= query_pos[:, None]) & (cell_seq == query_seq[:, None])
        assert error(got, case.answer(seen, sinks=sinks)) <= BOUND


def test_a_state_joins_and_another_comes_from_the_host(device: GpuDevice) -> None:
    case = Small(n_q=2, n_cells=192)
    state = case_state(case, 128)
    with GpuAttention(case.shape, device, n_slots=2) as attention:
        q = device.upload(case.q)
        for part, join in ((slice(0, 64), False), (slice(64, 128), True)):
            k, v = (on_gpu(device, x[part], 64) for x in (case.k, case.v))
            attention.attend(q, k, v, 64, first=0, join=join)
        host = device.pinned(state.nbytes)
        host.bytes[:] = state.view(np.uint8)
        where = 1, case.n_q, host.address, device.stream
        binding.call("pa_cuda_put_state", attention._plan, *where)
        got = attention.combine(case.n_q, 2)
        assert error(got, case.answer(case.everything())) <= BOUND


def case_state(case: Small, first: int) -> np.ndarray:
    """The partial state over the cells from `first` on as the CPU gives it: o, m, l."""
    k, v = (np.repeat(x[first:], 5, 1) for x in (case.k_values, case.v_values))
    s = np.einsum("qhd,chd->qhc", case.q.astype(np.float64), k) / 8.0 * np.log2(np.e)
    m = s.max(2, keepdims=True) - 2.0  # any reference is legal
    w = np.exp2(s - m)
    parts = (np.einsum("qhc,chd->qhd", w, v), m, w.sum(2))
    return np.concatenate([part.ravel() for part in parts]).astype(np.float32)


def ring_of(device: GpuDevice, case: Small, piece_cells: int) -> list[ColdRun]:
    runs = []
    for first in range(0, case.n_cells, piece_cells):
        parts = [x[first : first + piece_cells].ravel() for x in (case.k, case.v)]
        memory = device.pinned(sum(part.nbytes for part in parts))
        memory.bytes[:] = np.concatenate(parts)
        runs.append(ColdRun(memory, piece_cells, parts[0].nbytes, memory.n_bytes))
    return runs


def test_cold_runs_and_a_token_that_is_cancelled(device: GpuDevice) -> None:
    case = Small(n_q=1, n_cells=320)
    runs = ring_of(device, case, 64)
    q = device.upload(case.q)
    with (
        GpuRing(device, 3, runs[0].n_bytes) as ring,
        GpuAttention(case.shape, device, n_slots=5) as attention,
    ):
        rows = ring.rows(runs, 128, case.n_kv_head)

        def use(i: int) -> None:
            attention.attend(q, *rows[i], 64, first=i)

        def stop(i: int) -> None:
            if i == 2:
                raise KeyboardInterrupt

        with pytest.raises(KeyboardInterrupt):
            ring.deliver(runs, stop)
        for _ in range(2):
            ring.deliver(runs, use)
        ring.wait()
        got = attention.combine(1, 5)
        assert error(got, case.answer(case.everything())) <= BOUND


def test_a_stream_of_ones_own(device: GpuDevice) -> None:
    case = Small(n_q=1)
    stream = device.driver.handle("cuStreamCreate", cuda_driver.NON_BLOCKING)
    k, v = (on_gpu(device, x, 32) for x in (case.k, case.v))
    with GpuAttention(case.shape, device, n_slots=1) as attention:
        attention.attend(device.upload(case.q), k, v, case.n_cells, stream=stream)
        device.synchronize(stream)
        got = attention.combine(1, 1)
        assert error(got, case.answer(case.everything())) <= BOUND
    device.driver.call("cuStreamDestroy_v2", stream)


def test_pages_out_of_step_are_refused_before_they_are_read(device: GpuDevice) -> None:
    case = Small(n_q=1)
    memory = device.alloc(1 << 16)
    rows = GpuRows.at(device, [memory.address, memory.address + 8], 100, 256, 128)
    with (
        GpuAttention(case.shape, device, n_slots=1) as attention,
        pytest.raises(PaError, match="multiples of 8 bytes, not of 16"),
    ):
        attention.attend(device.upload(case.q), rows, rows, 200)


def test_a_ring_goes_on_after_a_begin_that_was_refused(device: GpuDevice) -> None:
    case = Small(n_q=1, n_cells=192)
    runs = ring_of(device, case, 64)
    with GpuRing(device, 3, runs[0].n_bytes) as ring:
        too_large = ColdRun(runs[0].memory, 64, 0, runs[0].n_bytes + 16)
        with pytest.raises(PaError) as refused:
            ring.deliver([too_large], lambda i: None)
        assert refused.value.status is PaStatus.BAD_ARGUMENT
        ring.deliver(runs, lambda i: None)
        ring.wait()
        assert binding.load().pa_cuda_ring_end(ring._ring) == 0  # nothing is under way
