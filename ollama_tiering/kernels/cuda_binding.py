"""paged_attn_cuda.h for ctypes: structs, prototypes, statuses as exceptions.

The host part (csrc/cuda/host) is compiled at the first use, once per sources, into the cache
directory; it loads without a driver.
"""

from __future__ import annotations

import ctypes
import enum
import functools
import hashlib
import os
import shutil
import subprocess
import tempfile
from pathlib import Path
from typing import Any

from ollama_tiering import config
from ollama_tiering.errors import BuildError, MissingTool, TieringError
from ollama_tiering.kernels.nvrtc import source_root

SOURCES = ("driver.cpp", "device.cpp", "plan.cpp", "ring.cpp", "share.cpp")
FLAGS = ("-std=c++17", "-O2", "-fPIC", "-shared", "-fvisibility=hidden")


class CudaStatus(enum.IntEnum):
    """`pa_status`."""

    OK = 0
    BAD_ARGUMENT = 1
    UNSUPPORTED = 2
    OUT_OF_MEMORY = 3
    NO_DEVICE = 4
    DEVICE_ERROR = 5
    CANCELLED = 6


class CudaError(TieringError):
    """The library refused or failed; `status` says which kind, the message why."""

    def __init__(self, status: CudaStatus, message: str) -> None:
        super().__init__(message)
        self.status = status


class Shape(ctypes.Structure):
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


class Rows(ctypes.Structure):
    _fields_ = (
        ("pages", ctypes.c_void_p),
        ("n_pages", ctypes.c_int32),
        ("page_cells", ctypes.c_int32),
        ("cell_stride", ctypes.c_int64),
        ("head_stride", ctypes.c_int64),
    )


class Mask(ctypes.Structure):
    _fields_ = (
        ("dense", ctypes.c_void_p),
        ("dense_stride", ctypes.c_int64),
        ("cell_pos", ctypes.c_void_p),
        ("cell_seq", ctypes.c_void_p),
        ("query_pos", ctypes.c_void_p),
        ("query_seq", ctypes.c_void_p),
        ("window", ctypes.c_int32),
    )


class Args(ctypes.Structure):
    _fields_ = (
        ("n_q", ctypes.c_int32),
        ("n_cells", ctypes.c_int32),
        ("q", ctypes.c_void_p),
        ("q_stride", ctypes.c_int64),
        ("q_head_stride", ctypes.c_int64),
        ("k", Rows),
        ("v", Rows),
        ("mask", Mask),
        ("sinks", ctypes.c_void_p),
        ("out", ctypes.c_void_p),
        ("state_m", ctypes.c_void_p),
        ("state_l", ctypes.c_void_p),
        ("state_o", ctypes.c_void_p),
    )


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
    "pa_cuda_close": (None, [_ADDRESS]),
    "pa_cuda_plan_create": (
        _STATUS,
        [_ADDRESS, ctypes.POINTER(Shape), _INT, ctypes.c_char_p, _SIZE, _HANDLE],
    ),
    "pa_cuda_plan_bytes": (_SIZE, [_ADDRESS]),
    "pa_cuda_plan_destroy": (None, [_ADDRESS]),
    "pa_cuda_splits": (_INT, [_ADDRESS, _INT, _INT, _INT]),
    "pa_cuda_attend": (_STATUS, [_ADDRESS, ctypes.POINTER(Args), _INT, _INT, _INT, _ADDRESS]),
    "pa_cuda_put_state": (_STATUS, [_ADDRESS, _INT, _INT, _ADDRESS, _ADDRESS]),
    "pa_cuda_combine": (_STATUS, [_ADDRESS, _INT, _INT, _ADDRESS, _ADDRESS, _ADDRESS]),
    "pa_cuda_ring_create": (_STATUS, [_ADDRESS, _INT, _SIZE, _HANDLE]),
    "pa_cuda_ring_slot": (ctypes.c_uint64, [_ADDRESS, _INT]),
    "pa_cuda_ring_begin": (_STATUS, [_ADDRESS, ctypes.POINTER(Piece), _INT]),
    "pa_cuda_ring_acquire": (_STATUS, [_ADDRESS, _INT, _ADDRESS]),
    "pa_cuda_ring_release": (_STATUS, [_ADDRESS, _INT, _ADDRESS]),
    "pa_cuda_ring_end": (_STATUS, [_ADDRESS]),
    "pa_cuda_ring_destroy": (None, [_ADDRESS]),
    "pa_cuda_cpu_share": (_STATUS, [ctypes.POINTER(Rates), _INT, _SIZE, ctypes.POINTER(_INT)]),
}


def build() -> Path:
    """The library's file. MissingTool without a compiler, BuildError when it fails."""
    root = source_root()
    host = root / "cuda" / "host"
    found = shutil.which(os.environ.get("CXX", "c++"))
    if found is None:
        raise MissingTool("no C++ compiler on PATH to build the GPU launcher", hint="install g++")
    digest = hashlib.sha256(found.encode())
    headers = [*(root / "include" / "paged_attn").glob("*.h"), root / "cuda" / "problem.h"]
    for path in sorted([*host.iterdir(), *headers]):
        digest.update(path.name.encode() + b"\0" + path.read_bytes())
    target = config.cache_dir() / "cuda" / f"libpaged_attn_cuda-{digest.hexdigest()[:16]}.so"
    if target.is_file():
        return target
    target.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=target.parent) as folder:
        made = Path(folder) / target.name
        sources = [str(host / name) for name in SOURCES]
        command = [found, *FLAGS, f"-I{root}", f"-I{root / 'include'}", *sources]
        command += ["-o", str(made), "-ldl"]
        ran = subprocess.run(command, capture_output=True, text=True, check=False)
        if ran.returncode != 0:
            raise BuildError(f"building the GPU launcher failed: {ran.stderr.strip()[:2000]}")
        made.replace(target)
    return target


@functools.cache
def load() -> ctypes.CDLL:
    """The library, its functions typed. Kept: loaded once per process."""
    library = ctypes.CDLL(str(build()))
    for name, (result, arguments) in _PROTOTYPES.items():
        function = getattr(library, name)
        function.restype, function.argtypes = result, arguments
    return library


def call(name: str, *arguments: Any) -> None:
    """A function that answers a status; CudaError with its sentence unless it is OK."""
    status = CudaStatus(getattr(load(), name)(*arguments))
    if status is not CudaStatus.OK:
        raise CudaError(status, load().pa_cuda_last_error().decode(errors="replace"))


def cpu_share(rates: Rates, n_pieces: int, piece_bytes: int) -> int:
    """How many of `n_pieces` cold pieces the CPU should take, from measured rates (share.cpp)."""
    pieces = ctypes.c_int32()
    call("pa_cuda_cpu_share", ctypes.byref(rates), n_pieces, piece_bytes, ctypes.byref(pieces))
    return pieces.value
