"""Numpy in the place of the C++ library, for tests of what is around the kernels."""

from __future__ import annotations

from typing import Any, Self

import numpy as np
from numpy.typing import NDArray

from ollama_tiering.kernels.binding import PaError, PaStatus
from ollama_tiering.kernels.rows import Rows
from ollama_tiering.kernels.shape import Shape
from tests.unit.kernels.numpy_reference import reference_numpy


class NumpyAttention:
    """As CpuAttention; this "machine" has avx512 and scalar. `skew` is added to every result."""

    skew = 0.0

    def __init__(self, shape: Shape, threads: int, isa: str = "auto") -> None:
        if isa not in ("auto", "avx512", "scalar"):
            raise PaError(PaStatus.UNSUPPORTED, f"no {isa} here")
        if shape.d_k == 80:
            raise PaError(PaStatus.UNSUPPORTED, "head size 80")
        self.shape, self.isa = shape, "avx512" if isa == "auto" else isa

    def run(
        self,
        q: NDArray[np.float32],
        k: Rows,
        v: Rows,
        *,
        out: NDArray[np.float32],
        **options: Any,
    ) -> None:
        out[:] = reference_numpy(self.shape, q, k, v, **options) + self.skew

    def close(self) -> None:
        pass

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_error: object) -> None:
        pass
