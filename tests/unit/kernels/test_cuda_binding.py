"""The GPU library from Python where there is no GPU: it builds, loads, and says why not."""

from __future__ import annotations

import ctypes
import shutil
from collections.abc import Callable

import pytest

from ollama_tiering.kernels import cuda_binding as binding
from ollama_tiering.kernels import gpu
from ollama_tiering.kernels.binding import (
    PaArgs,
    PaError,
    PaMask,
    PaRows,
    PaShape,
    PaStatus,
)
from ollama_tiering.kernels.gpu_device import GpuDevice
from ollama_tiering.kernels.shape import Shape

pytestmark = pytest.mark.skipif(shutil.which("c++") is None, reason="no C++ compiler")


def has_driver() -> bool:
    try:
        ctypes.CDLL("libcuda.so.1")
    except OSError:
        return False
    return True


@pytest.mark.skipif(has_driver(), reason="there is a driver here")
@pytest.mark.timeout(600)
@pytest.mark.parametrize(
    "opens",
    [
        lambda: GpuDevice(),
        lambda: binding.call("pa_cuda_open", 0, ctypes.byref(ctypes.c_void_p())),
    ],
)
def test_without_a_driver_the_library_loads_and_says_so(opens: Callable[[], object]) -> None:
    with pytest.raises(PaError, match=r"libcuda\.so\.1 was not found") as caught:
        opens()
    assert caught.value.status is PaStatus.NO_DEVICE


@pytest.mark.timeout(600)
def test_share_from_measured_rates() -> None:
    """How many of the cold pieces the CPU should take (share.cpp)."""
    pieces = ctypes.c_int32()

    def share(rates: binding.Rates, n_pieces: int, piece_bytes: int) -> None:
        call = ctypes.byref(rates), n_pieces, piece_bytes, ctypes.byref(pieces)
        binding.call("pa_cuda_cpu_share", *call)

    # PCIe 4, DDR5: memory leaves the CPU 45.5
    share(binding.Rates(24.5e9, 60e9, 70e9, 0.0), 700, 4 << 20)
    assert pieces.value == 455
    with pytest.raises(PaError, match="positive numbers"):
        share(binding.Rates(0.0, 1.0, 1.0, 0.0), 1, 1)


def test_structs_are_the_headers() -> None:
    sizes = [ctypes.sizeof(s) for s in (PaShape, PaRows, PaMask, PaArgs)]
    assert sizes == [40, 32, 56, 192]


@pytest.mark.parametrize(
    ("n_head", "n_kv_head", "rows"), [(40, 8, 5), (8, 8, 1), (16, 1, 8), (12, 1, 6), (10, 1, 5)]
)
def test_rows_of_a_decode_block_are_even(n_head: int, n_kv_head: int, rows: int) -> None:
    shape = Shape(n_head, n_kv_head, 128, 128, 1, 100)
    assert gpu.instance_of(shape, 16).rows == rows
