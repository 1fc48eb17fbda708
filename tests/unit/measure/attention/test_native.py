"""The compiled helpers: peaks that are rates, and ggml itself from the cached source."""

from __future__ import annotations

import platform
from pathlib import Path

import numpy as np
import pytest

from measure.attention.native import ggml_program, peaks_library
from measure.attention.peaks import Peaks
from measure.attention.sides import ggml
from ollama_tiering import config
from ollama_tiering.errors import TieringError
from ollama_tiering.kernels.samples import Problem, make, relative_error
from ollama_tiering.kernels.shape import Dtype
from ollama_tiering.patchset.report import Report
from ollama_tiering.patchset.upstream import SourceCache
from tests.unit.kernels.numpy_reference import reference_numpy

QUIET = Report(quiet=True)


@pytest.mark.slow
def test_peaks_are_measured(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OLLAMA_TIERING_CACHE", str(tmp_path))
    library = peaks_library(QUIET)
    made = library.stat().st_mtime_ns
    assert peaks_library(QUIET) == library
    assert library.stat().st_mtime_ns == made  # not compiled again
    peaks = Peaks(library, threads=1, repeats=2, memory_bytes=1 << 20)
    assert peaks.fma_flops("mmx") == 0
    assert peaks.fma_flops("scalar") == 0
    if platform.machine() in ("x86_64", "aarch64"):
        isa = "neon" if platform.machine() == "aarch64" else "avx2"
        assert 1e8 < peaks.fma_flops(isa) < 1e12
    assert 1e7 < peaks.read_bytes() < 1e13
    peaks._memory[: 1 << 19] = np.arange(1 << 19, dtype=np.uint64).view(np.uint8)[: 1 << 19]
    assert 1e7 < peaks.copy_bytes() < 1e13
    assert np.array_equal(peaks._memory[1 << 19 :], peaks._memory[: 1 << 19])


@pytest.fixture(scope="module")
def program() -> Path:
    cache = SourceCache()
    if not cache.has(config.DEFAULT_TAG):
        pytest.skip(f"{config.DEFAULT_TAG} is not cached: tiering fetch")
    return ggml_program(cache, config.DEFAULT_TAG, "native", QUIET)


CASES = {
    "decode": (Problem(10, 2, 128, 128, 1000), 2e-2, 1e-3),
    "batches": (Problem(16, 8, 128, 128, 700, n_q=300, batch=128), 2e-2, 1e-3),
    "d 80": (Problem(4, 4, 80, 80, 77, n_q=5), 2e-2, 1e-3),
    "q8_0": (Problem(8, 2, 64, 64, 512, k_type=Dtype.Q8_0, v_type=Dtype.Q8_0), 2e-2, None),
    "q4_0": (Problem(8, 2, 64, 64, 512, k_type=Dtype.Q4_0, v_type=Dtype.Q4_0), 2e-2, None),
}


@pytest.mark.slow
@pytest.mark.upstream
@pytest.mark.timeout(900)  # the first builds ggml
@pytest.mark.parametrize("case", CASES)
def test_ggml_computes_attention(program: Path, case: str) -> None:
    """That the graphs are right: what is wrong by a mask, a stride or a head is off by 1."""
    problem, flash_bound, plain_bound = CASES[case]
    sample = make(problem)
    cells = problem.n_cells
    right = reference_numpy(
        problem.shape, sample.q, sample.k, sample.v, mask=sample.mask(slice(0, problem.n_q), cells)
    )
    with ggml(program, sample, 2) as theirs:
        (seconds,) = theirs.turn(flash=True, repeats=1)
        assert seconds > 0
        assert relative_error(theirs.out, right) < flash_bound
        if plain_bound is None:
            with pytest.raises(TieringError, match="V cannot be quantised"):
                theirs.turn(flash=False, repeats=1)
        else:
            assert len(theirs.turn(flash=False, repeats=3)) == 3
            assert relative_error(theirs.out, right) < plain_bound
