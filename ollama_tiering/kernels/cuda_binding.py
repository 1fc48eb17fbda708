"""paged_attn_cuda.h for ctypes: the GPU part of libpaged_attn.so, which loads without a driver."""

from __future__ import annotations

import ctypes
import functools
from typing import Any

from ollama_tiering.kernels import library
from ollama_tiering.kernels.binding import PaArgs, PaError, PaMask, PaShape, PaStatus


class Piece(ctypes.Structure):
    _fields_ = (("host", ctypes.c_void_p), ("bytes", ctypes.c_size_t))


class Rates(ctypes.Structure):
    _fields_ = (
        ("stream_bytes_per_s", ctypes.c_double),
        ("cpu_bytes_per_s", ctypes.c_double),
        ("memory_bytes_per_s", ctypes.c_double),
        ("head_start_s", ctypes.c_double),
    )


_ADDRESS, _INT, _SIZE = ctypes.c_void_p, ctypes.c_int32, ctypes.c_size_t
_HANDLE = ctypes.POINTER(ctypes.c_void_p)
_STATUS = ctypes.c_int

# name -> (result, arguments)
_PROTOTYPES: dict[str, tuple[Any, list[Any]]] = {
    "pa_cuda_last_error": (ctypes.c_char_p, []),
    "pa_cuda_open": (_STATUS, [_INT, _HANDLE]),
    "pa_cuda_arch": (_INT, [_ADDRESS]),
    "pa_cuda_multiprocessors": (_INT, [_ADDRESS]),
    "pa_cuda_synchronize": (_STATUS, [_ADDRESS, _ADDRESS]),
    "pa_cuda_close": (None, [_ADDRESS]),
    "pa_cuda_plan_create": (
        _STATUS,
        [_ADDRESS, ctypes.POINTER(PaShape), _INT, ctypes.c_char_p, _SIZE, _HANDLE],
    ),
    "pa_cuda_slots": (_INT, [_ADDRESS, _INT]),
    "pa_cuda_plan_bytes": (_SIZE, [_ADDRESS]),
    "pa_cuda_plan_destroy": (None, [_ADDRESS]),
    "pa_cuda_splits": (_INT, [_ADDRESS, _INT, _INT, _INT]),
    "pa_cuda_decode_rows": (_STATUS, [_ADDRESS, _INT]),
    "pa_cuda_split_cells": (_STATUS, [_ADDRESS, _INT]),
    "pa_cuda_prepare": (_STATUS, [_ADDRESS, ctypes.POINTER(PaMask), _INT, _ADDRESS]),
    "pa_cuda_attend": (_STATUS, [_ADDRESS, ctypes.POINTER(PaArgs), _INT, _INT, _INT, _ADDRESS]),
    "pa_cuda_check_pages": (_STATUS, [_ADDRESS, ctypes.POINTER(PaArgs)]),
    "pa_cuda_put_state": (_STATUS, [_ADDRESS, _INT, _INT, _ADDRESS, _ADDRESS]),
    "pa_cuda_combine": (_STATUS, [_ADDRESS, _INT, _INT, _ADDRESS, _ADDRESS, _ADDRESS]),
    "pa_cuda_ring_create": (_STATUS, [_ADDRESS, _INT, _SIZE, _HANDLE]),
    "pa_cuda_ring_slot": (ctypes.c_uint64, [_ADDRESS, _INT]),
    "pa_cuda_ring_begin": (_STATUS, [_ADDRESS, ctypes.POINTER(Piece), _INT]),
    "pa_cuda_ring_acquire": (_STATUS, [_ADDRESS, _INT, _ADDRESS]),
    "pa_cuda_ring_release": (_STATUS, [_ADDRESS, _INT, _ADDRESS]),
    "pa_cuda_ring_end": (_STATUS, [_ADDRESS]),
    "pa_cuda_ring_wait": (_STATUS, [_ADDRESS]),
    "pa_cuda_ring_destroy": (None, [_ADDRESS]),
    "pa_cuda_cpu_share": (_STATUS, [ctypes.POINTER(Rates), _INT, _SIZE, ctypes.POINTER(_INT)]),
}


@functools.cache
def load() -> ctypes.CDLL:
    """The library, with the types of these functions, too. MissingTool or BuildError if it cannot
    be made.
    """
    loaded = library.load()
    for name, (result, arguments) in _PROTOTYPES.items():
        function = getattr(loaded, name)
        function.restype, function.argtypes = result, arguments
    return loaded


def call(name: str, *arguments: Any) -> None:
    """Calls a function that returns a status; PaError with its sentence unless that is OK."""
    status = PaStatus(getattr(load(), name)(*arguments))
    if status is not PaStatus.OK:
        raise PaError(status, load().pa_cuda_last_error().decode(errors="replace"))
