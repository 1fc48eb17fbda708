from __future__ import annotations

import pytest

from measure.attention import rig, sides
from ollama_tiering.kernels import samples
from tests.unit.kernels.numpy_attention import NumpyAttention
from tests.unit.kernels.numpy_reference import reference_numpy


@pytest.fixture
def numpy_kernels(monkeypatch: pytest.MonkeyPatch) -> type[NumpyAttention]:
    for module in (rig, sides):
        monkeypatch.setattr(module, "CpuAttention", NumpyAttention)
    monkeypatch.setattr(samples, "reference", reference_numpy)
    monkeypatch.setattr(NumpyAttention, "skew", 0.0)
    return NumpyAttention
