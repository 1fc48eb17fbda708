"""Bad input of every kind is a PaError with a sentence; nothing crashes and nothing is silent."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import numpy as np
import pytest

from ollama_tiering.kernels import (
    CpuAttention,
    DenseMask,
    Dtype,
    PaError,
    PaStatus,
    PositionMask,
    Rows,
    Shape,
    State,
    finish,
    merge,
    reference,
)
from tests.unit.kernels.problems import Problem, problem

GIVEN = problem(n_q=2, n_cells=96)
SHAPE = GIVEN.shape


@pytest.fixture(scope="module")
def attention() -> Iterator[CpuAttention]:
    with CpuAttention(SHAPE, threads=2) as made:
        yield made


@pytest.mark.parametrize(
    ("shape", "status", "says"),
    [
        (replace(SHAPE, n_kv_head=3), PaStatus.BAD_ARGUMENT, "4 query heads over 3 K/V heads"),
        (replace(SHAPE, d_k=0), PaStatus.BAD_ARGUMENT, "d_k is 0"),
        (replace(SHAPE, d_v=72), PaStatus.UNSUPPORTED, "multiple of 16"),
        (replace(SHAPE, d_v=80, v_type=Dtype.Q8_0), PaStatus.UNSUPPORTED, "multiple of 32"),
        (replace(SHAPE, d_k=2048), PaStatus.UNSUPPORTED, "at most 1024"),
        (replace(SHAPE, max_q=2**30), PaStatus.UNSUPPORTED, "too many for one run"),
        (replace(SHAPE, max_cells=0), PaStatus.BAD_ARGUMENT, "max_cells 0"),
        (replace(SHAPE, max_q=2**31), PaStatus.BAD_ARGUMENT, "max_q does not fit into 32 bits"),
        (replace(SHAPE, scale=float("nan")), PaStatus.BAD_ARGUMENT, "scale"),
        (replace(SHAPE, softcap=-1.0), PaStatus.BAD_ARGUMENT, "softcap"),
    ],
)
def test_shapes(shape: Shape, status: PaStatus, says: str) -> None:
    with pytest.raises(PaError, match=says) as caught:
        CpuAttention(shape, threads=1)
    assert caught.value.status is status


def test_a_plan_that_fits_into_no_memory() -> None:
    shape = Shape(n_head=2**30, n_kv_head=1, d_k=1024, d_v=1024, max_q=1, max_cells=1)
    with pytest.raises(PaError, match="no memory for a plan of") as caught:
        CpuAttention(shape, threads=1)
    assert caught.value.status is PaStatus.OUT_OF_MEMORY


@pytest.mark.parametrize("threads", [0, -1, 5000, 2**32 + 1])
def test_threads(threads: int) -> None:
    with pytest.raises(PaError, match="threads: 1 to 1024 are possible"):
        CpuAttention(SHAPE, threads)


def test_instruction_sets() -> None:
    with pytest.raises(PaError, match="mmx is no instruction set"):
        CpuAttention(SHAPE, 1, isa="mmx")


Q, K, V = GIVEN.q, GIVEN.k, GIVEN.v
POSITIONS = np.arange(96, dtype=np.int32)
OTHER: Problem = problem(n_cells=96, d_k=128, k_type=Dtype.Q8_0)


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"q": Q.astype(np.float64)}, "q is float64"),
        ({"q": Q[:, :3]}, r"q is float32 \[2, 3, 64\], not float32 \[2, 4, 64\]"),
        ({"q": np.zeros((3, 4, 64), np.float32)}, "n_q is 3"),
        ({"q": np.zeros((0, 4, 64), np.float32)}, "n_q is 0"),
        ({"q": np.float32(1)}, "q is float32"),
        ({"q": np.zeros((2, 4, 128), np.float32)[..., ::2]}, "not contiguous"),
        ({"n_cells": 97}, "n_cells is 97, the plan is for 0 to 96"),
        ({"n_cells": -1}, "n_cells is -1"),
        ({"k": OTHER.k}, "K is .*Q8_0"),
        ({"k": Rows(K.data[..., :100], K.dtype)}, "a cell of K is"),
        ({"v": Rows(V.data[:, :, :1], V.dtype)}, "a cell of V is"),
        ({"v": Rows(V.data[:2], V.dtype)}, "V: cell 95 is out of range: 2 pages of 32 cells"),
        ({"mask": DenseMask(np.zeros((2, 95), np.float16))}, r"the mask is \[2, 95\]"),
        ({"mask": PositionMask(POSITIONS[:9], POSITIONS[:2])}, "cell_pos has 9 values, not 96"),
        ({"mask": PositionMask(POSITIONS, POSITIONS[:3])}, "query_pos has 3 values, not 2"),
        ({"mask": PositionMask(POSITIONS, POSITIONS[:2], POSITIONS)}, "query_seq is missing"),
        ({"mask": PositionMask(POSITIONS, POSITIONS[:2], window=-2)}, "window is -2"),
        ({"sinks": np.zeros(3, np.float32)}, r"sinks is float32 \[3\]"),
        ({"sinks": np.zeros(8, np.float32)[::2]}, "sinks are not contiguous"),
        ({"out": np.zeros((2, 4, 63), np.float32)}, "out is float32"),
        ({"out": np.zeros((2, 4, 128), np.float32)[..., ::2]}, "out is not contiguous"),
    ],
)
def test_runs(attention: CpuAttention, change: dict[str, object], says: str) -> None:
    given = {"q": Q, "k": K, "v": V, **change}
    with pytest.raises(PaError, match=says):
        attention.run(**given)  # type: ignore[arg-type]
    if "out" not in change:
        with pytest.raises(PaError, match=says):
            reference(SHAPE, **given)  # type: ignore[arg-type]
    assert not np.isnan(attention.run(Q, K, V)).any()  # the plan is as good as before


@pytest.mark.parametrize(
    ("make", "says"),
    [
        (lambda: Rows(np.zeros((3, 32, 128), np.uint8), Dtype.F16), "with 3 axes"),
        (lambda: Rows(np.zeros((3, 32, 2, 64), np.float16), Dtype.F16), "not float16"),  # type: ignore[arg-type]
        (lambda: Rows(K.data[..., ::2], Dtype.F16), "not contiguous"),
        (lambda: Rows(K.data, K.dtype, np.array([0, 3])), "page 3 is out of range: there are 3"),
        (lambda: Rows(K.data, K.dtype, np.array([-1])), "page -1 is out of range"),
        (lambda: Rows(K.data, K.dtype, np.array([0.5])), "integers"),
        (lambda: DenseMask(np.zeros((2, 96), np.float32)), "a dense mask is f16"),  # type: ignore[arg-type]
        (lambda: DenseMask(np.zeros((2, 96), np.float16)[:, ::2]), "not contiguous"),
        (lambda: PositionMask(POSITIONS.astype(np.int64), POSITIONS), "cell_pos is int32"),  # type: ignore[arg-type]
        (lambda: PositionMask(POSITIONS, POSITIONS[::2]), "query_pos is int32"),
    ],
)
def test_arrays_of_another_kind(make: object, says: str) -> None:
    assert callable(make)
    with pytest.raises(PaError, match=says):
        make()


def test_states_that_do_not_fit_each_other() -> None:
    def state(n_q: int) -> State:
        m = np.zeros((n_q, 4), np.float32)
        return State(m, m + 1, np.zeros((n_q, 4, 64), np.float32))

    with pytest.raises(PaError, match="o of state b is float32"):
        merge(state(2), state(3))
    with pytest.raises(PaError, match="l of the state is float64"):
        finish(state(2)._replace(l=np.ones((2, 4))))  # type: ignore[arg-type]
    with pytest.raises(PaError, match="sinks is float32"):
        finish(state(2), np.zeros(3, np.float32))


def test_a_closed_plan() -> None:
    made = CpuAttention(SHAPE, threads=1)
    made.close()
    made.close()
    with pytest.raises(PaError, match="this plan is closed"):
        made.run(Q, K, V)
