"""Why there is no GPU, in the words of who lacks what. (What a GPU computes: tests/gpu.)"""

from __future__ import annotations

import ctypes
import importlib.util

import pytest

from ollama_tiering.kernels import check_gpu


def test_without_a_driver_it_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    def missing(name: str) -> None:
        raise OSError(f"{name}: cannot open shared object file")

    monkeypatch.setattr(ctypes, "CDLL", missing)
    devices, why = check_gpu.gpu_devices()
    assert devices == []
    assert "NVIDIA driver" in why


@pytest.mark.skipif(importlib.util.find_spec("cupy") is not None, reason="CuPy is installed")
def test_with_a_driver_and_without_cupy_it_names_cupy(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ctypes, "CDLL", lambda name: None)
    devices, why = check_gpu.gpu_devices()
    assert devices == []
    assert "CuPy" in why
