"""The two references: C++ and numpy, both f64, must say the same."""

from __future__ import annotations

import math

import numpy as np
import pytest

from ollama_tiering.kernels import (
    DenseMask,
    Dtype,
    Mask,
    PositionMask,
    Rows,
    Shape,
    reference,
)
from tests.unit.kernels.numpy_reference import reference_numpy
from tests.unit.kernels.problems import error, problem

N_Q, N_CELLS = 6, 90
SEEN = np.random.default_rng(7).random((N_Q, N_CELLS)) < 0.6
SEEN[2] = False
BIAS = DenseMask(np.random.default_rng(8).normal(size=(N_Q, N_CELLS)).astype(np.float16))
SEQUENCES = PositionMask(
    cell_pos=np.where(np.arange(N_CELLS) % 11 == 0, -1, np.arange(N_CELLS) // 3).astype(np.int32),
    cell_seq=(np.arange(N_CELLS) % 3).astype(np.int32),
    query_pos=np.array([0, 10, 29, 29, 29, 5], np.int32),
    query_seq=np.array([0, 1, 2, 0, 7, 1], np.int32),  # of sequence 7 there is nothing
    window=12,
)
MASKS: dict[str, Mask | None] = {
    "none": None,
    "causal": PositionMask.causal(N_Q, N_CELLS),
    "window": PositionMask.causal(N_Q, N_CELLS, window=5),
    "holes": DenseMask.of(SEEN),
    "bias": BIAS,
    "sequences": SEQUENCES,
}


@pytest.mark.parametrize("mask", MASKS.values(), ids=MASKS.keys())
@pytest.mark.parametrize("dtype", Dtype)
def test_cpp_and_numpy_agree(dtype: Dtype, mask: Mask | None) -> None:
    given = problem(n_q=N_Q, n_cells=N_CELLS, k_type=dtype, v_type=dtype)
    sinks = np.array([-2.0, 0.0, 3.0, 40.0], np.float32)
    for chosen in (None, sinks):
        args = (given.shape, given.q, given.k, given.v)
        cpp = reference(*args, n_cells=N_CELLS, mask=mask, sinks=chosen)
        assert error(cpp, reference_numpy(*args, n_cells=N_CELLS, mask=mask, sinks=chosen)) < 1e-13


@pytest.mark.parametrize("softcap", [0.5, 30.0])
def test_cpp_and_numpy_agree_with_softcap(softcap: float) -> None:
    given = problem(n_q=3, deviation=20.0, softcap=softcap)
    args = (given.shape, given.q, given.k, given.v)
    assert error(reference(*args, n_cells=100), reference_numpy(*args, n_cells=100)) < 1e-13


def test_two_cells_by_hand() -> None:
    keys = np.zeros((2, 1, 16), np.float32)
    keys[1] = 1.0
    values = np.stack([np.full((1, 16), 2.0), np.full((1, 16), 6.0)]).astype(np.float32)
    shape = Shape(1, 1, 16, 16, 1, 2, Dtype.F32, Dtype.F32, scale=math.log(3) / 16)
    q = np.ones((1, 1, 16), np.float32)  # logits 0 and log 3: weights 1/4 and 3/4
    k, v = Rows.of_values(keys, Dtype.F32), Rows.of_values(values, Dtype.F32)
    for out in (reference(shape, q, k, v), reference_numpy(shape, q, k, v)):
        assert np.allclose(out, 5.0, rtol=1e-7)


def test_queries_that_see_nothing_give_zero() -> None:
    given = problem(n_q=2)
    mask = DenseMask.of(np.zeros((2, 100), bool))
    for answer in (reference, reference_numpy):
        out = answer(given.shape, given.q, given.k, given.v, n_cells=100, mask=mask)
        assert not out.any()
