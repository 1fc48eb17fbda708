"""Problems from a seed: their counts, their pages, and the measure of error."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from measure.attention.others import in_cache, with_rounded_logits
from ollama_tiering.kernels import samples
from ollama_tiering.kernels.samples import Problem, exact, make, relative_error
from ollama_tiering.kernels.shape import Dtype
from tests.unit.kernels.numpy_reference import reference_numpy


@pytest.fixture(autouse=True)
def numpy_reference(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(samples, "reference", reference_numpy)


@pytest.mark.parametrize(("n_cells", "n_q", "batch"), [(1, 1, 512), (70, 70, 16), (40, 9, 4)])
def test_batches_cover_the_queries_and_flops_the_visible_pairs(
    n_cells: int, n_q: int, batch: int
) -> None:
    problem = Problem(6, 2, 64, 32, n_cells, n_q=n_q, batch=batch)
    pairs, seen = 0, []
    for queries, cells in problem.batches():
        mine = list(range(queries.start, queries.stop))
        seen += mine
        assert cells == n_cells - n_q + mine[-1] + 1
        pairs += sum(n_cells - n_q + query + 1 for query in mine)
        assert len(mine) <= problem.shape.max_q
    assert seen == list(range(n_q))
    assert problem.flops == pairs * 6 * 2 * (64 + 32)


def test_the_same_seed_gives_the_same_and_another_not() -> None:
    problem = Problem(2, 1, 64, 64, 50, k_type=Dtype.Q8_0)
    first, again, other = make(problem), make(problem), make(replace(problem, seed=2))
    assert np.array_equal(first.q, again.q)
    assert np.array_equal(first.k.cells(50), again.k.cells(50))
    assert not np.array_equal(first.k.cells(50), other.k.cells(50))


def test_shuffled_pages_hold_the_same_cells() -> None:
    problem = Problem(2, 2, 64, 64, 100)
    plain, paged = make(problem), make(replace(problem, page_cells=16))
    assert paged.k.n_pages == 7
    assert paged.k.table is not None
    assert not np.array_equal(paged.k.table, np.arange(7))
    assert np.array_equal(plain.k.cells(100), paged.k.cells(100))


@pytest.mark.parametrize("n_cells", [7, 32, 100])
def test_in_cache_every_page_is_the_first_few_cells(n_cells: int) -> None:
    sample = make(Problem(2, 2, 64, 64, n_cells, v_type=Dtype.Q8_0))
    near = in_cache(sample)
    cells = min(32, n_cells)
    assert near.problem == sample.problem
    for rows, original in ((near.k, sample.k), (near.v, sample.v)):
        assert set(rows.addresses) == {rows.data.ctypes.data}
        expected = original.cells(cells)[np.arange(n_cells) % cells]
        assert np.array_equal(rows.cells(n_cells), expected)
    assert exact(near, [0]).shape == (1, 2, 64)


def test_v_has_a_mean_and_queries_the_deviation_asked_for() -> None:
    sample = make(Problem(8, 2, 128, 128, 2000, n_q=50, query_deviation=300.0))
    v = sample.v.cells(2000).view(np.float16).astype(np.float64)
    assert v.mean() == pytest.approx(0.3, abs=0.01)
    assert sample.q.std() == pytest.approx(300, rel=0.05)


def test_error_is_relative_and_nan_stays() -> None:
    sample = make(Problem(4, 2, 64, 64, 30, n_q=12, window=8, sinks=True, softcap=20.0))
    right = exact(sample, range(12))
    assert right.shape == (12, 4, 64)
    whole = reference_numpy(
        sample.problem.shape,
        sample.q,
        sample.k,
        sample.v,
        mask=sample.mask(slice(0, 12), 30),
        sinks=sample.sinks,
    )
    assert relative_error(whole.astype(np.float32), right) < 1e-6
    assert relative_error((1.01 * right).astype(np.float32), right) == pytest.approx(0.01, rel=1e-3)
    broken = right.astype(np.float32)
    broken[3, 1, 5] = np.nan
    assert np.isnan(relative_error(broken, right))


def test_rounded_logits_cost_more_the_larger_they_are() -> None:
    errors = []
    for deviation in (1.0, 300.0):
        problem = Problem(6, 2, 64, 64, 500, n_q=3, query_deviation=deviation)
        sample = make(problem)
        right = exact(sample, [0, 2])
        errors.append(relative_error(with_rounded_logits(sample, [0, 2]), right))
    assert 0 < errors[0] < 1e-7
    assert errors[0] < errors[1] < 1e-3
