from __future__ import annotations

import pytest

from ollama_tiering.kernels import check, samples
from tests.unit.kernels.numpy_attention import NumpyAttention
from tests.unit.kernels.numpy_reference import reference_numpy


@pytest.fixture
def numpy_kernels(monkeypatch: pytest.MonkeyPatch) -> type[NumpyAttention]:
    monkeypatch.setattr(check, "CpuAttention", NumpyAttention)
    monkeypatch.setattr(samples, "reference", reference_numpy)
    monkeypatch.setattr(NumpyAttention, "skew", 0.0)
    return NumpyAttention
