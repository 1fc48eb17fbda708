"""The CUDA driver from Python: libcuda.so.1 by ctypes, which every machine with an NVIDIA GPU has.

Memory, streams, timing and graphs for tests and measurements; the kernels themselves are queued by
the C library. Importing this module needs no driver.
"""

from __future__ import annotations

import ctypes
from typing import Any, Final

from ollama_tiering.kernels.binding import PaError, PaStatus

NO_DEVICE: Final = 100  # CUDA_ERROR_NO_DEVICE
_OUT_OF_MEMORY: Final = 2

NON_BLOCKING: Final = 1  # a stream that does not wait for the default one
CAPTURE_THREAD_LOCAL: Final = 1  # only this thread's unsafe calls end a capture

# cuda.h's CUdevice_attribute
ATTRIBUTES: Final = {
    "multiprocessors": 16,
    "memory_clock_khz": 36,
    "memory_bus_bits": 37,
    "l2_bytes": 38,
    "major": 75,
    "minor": 76,
    "shared_bytes": 81,  # of a multiprocessor
    "registers": 82,  # likewise
}

_I, _U, _SIZE = ctypes.c_int, ctypes.c_uint, ctypes.c_size_t
_AT, _P = ctypes.c_uint64, ctypes.c_void_p  # a device address; a handle, or where a result goes

# name -> arguments; every one answers a CUresult
_PROTOTYPES: Final[dict[str, list[Any]]] = {
    "cuInit": [_U],
    "cuDriverGetVersion": [_P],
    "cuGetErrorString": [_I, _P],
    "cuDeviceGet": [_P, _I],
    "cuDeviceGetName": [_P, _I, _I],
    "cuDeviceTotalMem_v2": [_P, _I],
    "cuDeviceGetAttribute": [_P, _I, _I],
    "cuDevicePrimaryCtxRetain": [_P, _I],
    "cuDevicePrimaryCtxRelease_v2": [_I],
    "cuCtxSetCurrent": [_P],
    "cuMemAlloc_v2": [_P, _SIZE],
    "cuMemFree_v2": [_AT],
    "cuMemHostAlloc": [_P, _SIZE, _U],
    "cuMemFreeHost": [_P],
    "cuMemcpyHtoD_v2": [_AT, _P, _SIZE],
    "cuMemcpyDtoH_v2": [_P, _AT, _SIZE],
    "cuMemcpyHtoDAsync_v2": [_AT, _P, _SIZE, _P],
    "cuMemsetD8Async": [_AT, ctypes.c_ubyte, _SIZE, _P],
    "cuStreamCreate": [_P, _U],
    "cuStreamDestroy_v2": [_P],
    "cuStreamSynchronize": [_P],
    "cuStreamBeginCapture_v2": [_P, _I],
    "cuStreamEndCapture": [_P, _P],
    "cuGraphInstantiateWithFlags": [_P, _P, ctypes.c_uint64],
    "cuGraphLaunch": [_P, _P],
    "cuGraphExecDestroy": [_P],
    "cuGraphDestroy": [_P],
    "cuEventCreate": [_P, _U],
    "cuEventRecord": [_P, _P],
    "cuEventSynchronize": [_P],
    "cuEventElapsedTime": [_P, _P, _P],
    "cuEventDestroy_v2": [_P],
    "cuModuleLoadData": [_P, _P],
    "cuModuleUnload": [_P],
    "cuModuleGetFunction": [_P, _P, ctypes.c_char_p],
    "cuLaunchKernel": [_P, _U, _U, _U, _U, _U, _U, _U, _P, _P, _P],
}


class CudaDriver:
    """libcuda.so.1, started. PaError: NO_DEVICE if there is no driver or it finds no GPU,
    UNSUPPORTED if it lacks a function, DEVICE_ERROR if it does not start.
    """

    def __init__(self) -> None:
        try:
            self._library = ctypes.CDLL("libcuda.so.1")
        except OSError:
            message = "no NVIDIA driver here: libcuda.so.1 was not found"
            raise PaError(PaStatus.NO_DEVICE, message) from None
        for name, arguments in _PROTOTYPES.items():
            try:
                function = getattr(self._library, name)
            except AttributeError:
                message = f"the NVIDIA driver is older than this code: it has no {name}"
                raise PaError(PaStatus.UNSUPPORTED, message) from None
            function.argtypes, function.restype = arguments, ctypes.c_int
        self.call("cuInit", 0)

    def call(self, name: str, *arguments: Any) -> None:
        """PaError with the driver's words unless it succeeds."""
        if code := self.try_call(name, *arguments):
            text = ctypes.c_char_p()
            self.try_call("cuGetErrorString", code, ctypes.byref(text))
            status = {NO_DEVICE: PaStatus.NO_DEVICE, _OUT_OF_MEMORY: PaStatus.OUT_OF_MEMORY}
            words = (text.value or b"an error without a name").decode(errors="replace")
            raise PaError(status.get(code, PaStatus.DEVICE_ERROR), f"{name}: {words} ({code})")

    def try_call(self, name: str, *arguments: Any) -> int:
        """The driver's code, 0 for success; for calls whose error is expected or must not be
        raised.
        """
        return int(getattr(self._library, name)(*arguments))

    def handle(self, name: str, *arguments: Any) -> ctypes.c_void_p:
        """The handle that a function writes to its first argument."""
        made = ctypes.c_void_p()
        self.call(name, ctypes.byref(made), *arguments)
        return made

    def number(self, name: str, *arguments: Any) -> int:
        """The int that a function writes to its first argument."""
        value = ctypes.c_int()
        self.call(name, ctypes.byref(value), *arguments)
        return value.value
