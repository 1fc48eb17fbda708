"""csrc/include/paged_attn/paged_attn.h for ctypes: structs, prototypes, statuses as exceptions."""

from __future__ import annotations

import ctypes
import enum
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ollama_tiering.errors import TieringError

ABI_VERSION = 2


class PaStatus(enum.IntEnum):
    """`pa_status`."""

    OK = 0
    BAD_ARGUMENT = 1
    UNSUPPORTED = 2
    OUT_OF_MEMORY = 3
    NO_DEVICE = 4
    DEVICE_ERROR = 5
    CANCELLED = 6


class PaError(TieringError):
    """The attention library refused or failed; `status` says which kind, the message why."""

    def __init__(self, status: PaStatus, message: str) -> None:
        super().__init__(message)
        self.status = status


class PaShape(ctypes.Structure):
    _fields_ = (
        ("n_head", ctypes.c_int32),
        ("n_kv_head", ctypes.c_int32),
        ("d_k", ctypes.c_int32),
        ("d_v", ctypes.c_int32),
        ("max_q", ctypes.c_int32),
        ("max_cells", ctypes.c_int32),
        ("k_type", ctypes.c_int),
        ("v_type", ctypes.c_int),
        ("scale", ctypes.c_float),
        ("softcap", ctypes.c_float),
    )


class PaRows(ctypes.Structure):
    _fields_ = (
        ("pages", ctypes.c_void_p),
        ("n_pages", ctypes.c_int32),
        ("page_cells", ctypes.c_int32),
        ("cell_stride", ctypes.c_int64),
        ("head_stride", ctypes.c_int64),
    )


class PaMask(ctypes.Structure):
    _fields_ = (
        ("dense", ctypes.c_void_p),
        ("dense_stride", ctypes.c_int64),
        ("cell_pos", ctypes.c_void_p),
        ("cell_seq", ctypes.c_void_p),
        ("query_pos", ctypes.c_void_p),
        ("query_seq", ctypes.c_void_p),
        ("window", ctypes.c_int32),
    )


class PaArgs(ctypes.Structure):
    _fields_ = (
        ("n_q", ctypes.c_int32),
        ("n_cells", ctypes.c_int32),
        ("q", ctypes.c_void_p),
        ("q_stride", ctypes.c_int64),
        ("q_head_stride", ctypes.c_int64),
        ("k", PaRows),
        ("v", PaRows),
        ("mask", PaMask),
        ("sinks", ctypes.c_void_p),
        ("out", ctypes.c_void_p),
        ("state_m", ctypes.c_void_p),
        ("state_l", ctypes.c_void_p),
        ("state_o", ctypes.c_void_p),
    )


_SHAPE, _ARGS, _ADDRESS = ctypes.POINTER(PaShape), ctypes.POINTER(PaArgs), ctypes.c_void_p
_STATUS = ctypes.c_int

# name -> (result, arguments)
_PROTOTYPES: dict[str, tuple[Any, list[Any]]] = {
    "pa_abi_version": (ctypes.c_int32, []),
    "pa_last_error": (ctypes.c_char_p, []),
    "pa_cpu_plan_create": (
        _STATUS,
        [_SHAPE, ctypes.c_int32, ctypes.c_char_p, ctypes.POINTER(_ADDRESS)],
    ),
    "pa_cpu_run": (_STATUS, [_ADDRESS, _ARGS]),
    "pa_cpu_plan_isa": (ctypes.c_char_p, [_ADDRESS]),
    "pa_cpu_plan_bytes": (ctypes.c_size_t, [_ADDRESS]),
    "pa_cpu_plan_destroy": (None, [_ADDRESS]),
    "pa_reference": (_STATUS, [_SHAPE, _ARGS, _ADDRESS]),
    "pa_state_merge": (_STATUS, [ctypes.c_int64, ctypes.c_int32, *[_ADDRESS] * 6]),
    "pa_state_finish": (_STATUS, [ctypes.c_int64, ctypes.c_int32, *[_ADDRESS] * 5]),
}


def bind(library: ctypes.CDLL) -> ctypes.CDLL:
    """Gives the functions of a loaded library their types. OSError if it has another ABI."""
    for name, (result, arguments) in _PROTOTYPES.items():
        try:
            function = getattr(library, name)
        except AttributeError:
            raise OSError(f"{library._name} has no {name}") from None
        function.restype, function.argtypes = result, arguments
    found = library.pa_abi_version()
    if found != ABI_VERSION:
        raise OSError(f"{library._name} is ABI {found}, this package needs {ABI_VERSION}")
    return library


def check(library: ctypes.CDLL, status: int) -> None:
    """Raises what a call answered; `pa_last_error` is that of this thread."""
    if status != PaStatus.OK:
        text = (library.pa_last_error() or b"").decode(errors="replace")
        raise PaError(PaStatus(status), text)


def address(values: NDArray[Any] | None) -> int | None:
    """Says where an array lies; None if there is no array, or if it is empty."""
    return values.ctypes.data if values is not None and values.size else None


def f32(values: NDArray[Any], name: str, axes: tuple[int, ...]) -> NDArray[np.float32]:
    """`values` if they are f32 of exactly these axes, else a PaError that says what they are."""
    if values.dtype != np.float32 or values.shape != axes:
        raise PaError(
            PaStatus.BAD_ARGUMENT,
            f"{name} is {values.dtype} {list(values.shape)}, not float32 {list(axes)}",
        )
    return values
