"""What lies in cells that a query does not see, and where the ones it sees lie, changes no bit."""

from __future__ import annotations

import numpy as np
import pytest

from ollama_tiering.kernels import CpuAttention, DenseMask, Dtype, Rows, Shape
from tests.unit.kernels.problems import problem

ISAS = ["auto", "scalar"]


@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize("value", [np.inf, -np.inf, np.nan])
@pytest.mark.parametrize("n_q", [1, 3, 40])
def test_a_value_that_is_not_finite_reaches_only_who_sees_it(
    isa: str, value: float, n_q: int
) -> None:
    n_cells, bad = 150, 70
    given = problem(n_q=n_q, n_cells=n_cells)
    seen = np.random.default_rng(5).random((n_q, n_cells)) < 0.7
    seen[:, bad] = np.arange(n_q) % 2 == 1
    mask = DenseMask.of(seen)
    with CpuAttention(given.shape, threads=2, isa=isa) as attention:
        clean = attention.run(given.q, given.k, given.v, n_cells=n_cells, mask=mask)
        for rows in (given.k, given.v):
            slot = int(rows.table[bad // rows.page_cells]) if rows.table is not None else 0
            row = rows.data[slot, bad % rows.page_cells, 0].view(np.float16)
            kept = row.copy()
            row[5] = value
            out = attention.run(given.q, given.k, given.v, n_cells=n_cells, mask=mask)
            row[:] = kept
            sees = seen[:, bad]
            assert np.array_equal(out[~sees], clean[~sees])
            if rows is given.v:  # heads 0 and 1 share K/V head 0
                assert not np.isfinite(out[sees, :2, 5]).any()
            assert np.array_equal(out[sees, 2:], clean[sees, 2:])


@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize("n_q", [1, 4, 33])
def test_a_sequence_may_lie_anywhere(isa: str, n_q: int) -> None:
    """With gaps that belong to nobody, and in any order: its positions tell."""
    random = np.random.default_rng(7)
    n, room = 200, 517
    shape = Shape(6, 2, 64, 64, n_q, room, Dtype.F16, Dtype.Q8_0)
    q = random.normal(0, 1, (n_q, 6, 64)).astype(np.float32)
    k, v = (random.normal(0.3, 1, (n, 2, 64)).astype(np.float32) for _ in range(2))
    causal = np.arange(n)[None, :] <= np.arange(n - n_q, n)[:, None]

    def run(at: np.ndarray) -> np.ndarray:
        spread_k, spread_v = (np.full((room, 2, 64), np.inf, np.float32) for _ in range(2))
        spread_v[:] = 0  # q8_0 has no infinity
        spread_k[at], spread_v[at] = k, v
        seen = np.zeros((n_q, room), np.bool_)
        seen[:, at] = causal
        cell_pos = np.full(room, -1, np.int32)
        cell_pos[at] = np.arange(n)
        with CpuAttention(shape, threads=2, isa=isa) as attention:
            rows = (
                Rows.of_values(spread_k, Dtype.F16),
                Rows.of_values(spread_v, Dtype.Q8_0),
            )
            return attention.run(
                q, *rows, n_cells=room, mask=DenseMask(DenseMask.of(seen).values, cell_pos)
            )

    together = run(np.arange(n))
    assert np.array_equal(run(np.arange(n) + 300), together)
    assert np.array_equal(run(np.sort(random.permutation(room)[:n])), together)
    assert np.array_equal(run(random.permutation(room)[:n]), together)
