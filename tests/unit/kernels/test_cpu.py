"""The CPU library through ctypes, against the numpy reference."""

from __future__ import annotations

import threading

import numpy as np
import pytest

from ollama_tiering.kernels import (
    CpuAttention,
    DenseMask,
    Dtype,
    PositionMask,
    Rows,
    finish,
    merge,
)
from tests.unit.kernels.numpy_reference import reference_numpy
from tests.unit.kernels.problems import error, problem

BOUND = 1e-5


@pytest.mark.parametrize("v_type", Dtype)
@pytest.mark.parametrize("k_type", Dtype)
@pytest.mark.parametrize("n_q", [1, 20])
def test_every_pair_of_types_is_exact(k_type: Dtype, v_type: Dtype, n_q: int) -> None:
    given = problem(n_q=n_q, n_cells=130, k_type=k_type, v_type=v_type, n_head=10)
    mask = PositionMask.causal(n_q, 130)
    with CpuAttention(given.shape, threads=2) as attention:
        out = attention.run(given.q, given.k, given.v, n_cells=130, mask=mask)
    expected = reference_numpy(given.shape, given.q, given.k, given.v, n_cells=130, mask=mask)
    assert error(out, expected) < BOUND


@pytest.mark.parametrize("isa", ["auto", "scalar"])
def test_masks_and_sinks_reach_the_kernel(isa: str) -> None:
    given = problem(n_q=5)
    seen = np.random.default_rng(3).random((5, 100)) < 0.5
    seen[1] = False
    sinks = np.array([0.0, 5.0, -3.0, 90.0], np.float32)
    with CpuAttention(given.shape, threads=1, isa=isa) as attention:
        assert attention.isa == isa or isa == "auto"
        for mask in (DenseMask.of(seen), PositionMask.causal(5, 100, window=9), None):
            run = attention.run(given.q, given.k, given.v, n_cells=100, mask=mask, sinks=sinks)
            expected = reference_numpy(
                given.shape, given.q, given.k, given.v, n_cells=100, mask=mask, sinks=sinks
            )
            assert error(run, expected) < BOUND


def test_mla_shares_the_memory_of_k_and_v() -> None:
    given = problem(n_q=2, n_head=16, n_kv_head=1, d_k=576, d_v=512)
    v = Rows(given.k.data[..., : Dtype.F16.row_bytes(512)], Dtype.F16, given.k.table)
    with CpuAttention(given.shape, threads=2) as attention:
        out = attention.run(given.q, given.k, v, n_cells=100)
    expected = reference_numpy(given.shape, given.q, given.k, v, n_cells=100)
    assert error(out, expected) < BOUND


def test_queries_may_lie_apart() -> None:
    given = problem(n_q=4)
    apart = np.full((4, 3, 4, 70), np.nan, np.float32)[:, 1, :, 3:67]
    apart[:] = given.q
    with CpuAttention(given.shape, threads=1) as attention:
        together = attention.run(given.q, given.k, given.v, n_cells=100)
        assert np.array_equal(attention.run(apart, given.k, given.v, n_cells=100), together)


def test_the_bits_are_the_same_for_any_number_of_threads() -> None:
    given = problem(n_q=1, n_cells=2000)
    results = []
    for threads in (1, 2, 3, 5):
        with CpuAttention(given.shape, threads) as attention:
            results.append(attention.run(given.q, given.k, given.v, n_cells=2000))
    for other in results[1:]:
        assert np.array_equal(results[0], other)


def test_states_over_two_halves_merge_into_the_whole() -> None:
    given = problem(n_q=3, n_cells=128)
    assert given.k.table is not None
    assert given.v.table is not None
    sinks = np.array([0.0, 1.0, 2.0, 50.0], np.float32)
    with CpuAttention(given.shape, threads=2) as attention:
        first, second = (
            attention.state(
                given.q,
                Rows(given.k.data, given.k.dtype, given.k.table[half]),
                Rows(given.v.data, given.v.dtype, given.v.table[half]),
            )
            for half in (slice(0, 1), slice(1, 4))
        )
    out = finish(merge(first, second), sinks)
    expected = reference_numpy(given.shape, given.q, given.k, given.v, sinks=sinks)
    assert error(out, expected) < BOUND


def test_the_output_goes_where_it_is_wanted() -> None:
    given = problem()
    out = np.full((1, 4, 64), np.nan, np.float32)
    with CpuAttention(given.shape, threads=1) as attention:
        assert attention.run(given.q, given.k, given.v, n_cells=100, out=out) is out
    assert not np.isnan(out).any()


def test_two_plans_run_in_two_python_threads() -> None:
    given = problem(n_q=16, n_cells=1000)
    outs: list[np.ndarray] = []

    def work() -> None:
        with CpuAttention(given.shape, threads=2) as attention:
            outs.append(attention.run(given.q, given.k, given.v, n_cells=1000))

    threads = [threading.Thread(target=work) for _ in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert np.array_equal(outs[0], outs[1])


@pytest.mark.slow
@pytest.mark.parametrize("deviation", [1.0, 40.0], ids=["diffuse", "peaked"])
@pytest.mark.parametrize("dtype", [Dtype.F16, Dtype.BF16, Dtype.Q8_0, Dtype.Q4_0])
def test_128k_keys(dtype: Dtype, deviation: float) -> None:
    n_cells = 128 * 1024
    given = problem(
        n_head=5,
        n_kv_head=1,
        d_k=128,
        d_v=128,
        n_cells=n_cells,
        page_cells=512,
        k_type=dtype,
        v_type=dtype,
        deviation=deviation,
    )
    with CpuAttention(given.shape, threads=2) as attention:
        out = attention.run(given.q, given.k, given.v)
    found = error(out, reference_numpy(given.shape, given.q, given.k, given.v))
    print(f"128K keys, {dtype.name}, deviation {deviation}: {found:.2e}")
    assert found < BOUND
