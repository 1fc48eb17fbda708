"""One GPU: its context, memory, a stream, times by events and graphs. Nothing but the driver."""

from __future__ import annotations

import ctypes
import math
import weakref
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import DTypeLike, NDArray

from ollama_tiering.kernels import cuda_binding as binding
from ollama_tiering.kernels import cuda_driver
from ollama_tiering.kernels.cuda_driver import CudaDriver
from ollama_tiering.system.closing import Closing

Stream = ctypes.c_void_p


class Memory:
    """Memory of the device, or pinned memory of the host; given back with its last reference."""

    def __init__(self, address: int, n_bytes: int, free: Callable[[], None]) -> None:
        self.address, self.n_bytes = address, n_bytes
        self._finalizer = weakref.finalize(self, free)

    def free(self) -> None:
        self._finalizer()


class Pinned(Memory):
    """Host memory that the GPU reads by itself."""

    @property
    def bytes(self) -> NDArray[np.uint8]:
        """A view; it must not outlive this object."""
        memory = (ctypes.c_uint8 * self.n_bytes).from_address(self.address)
        return np.frombuffer(memoryview(memory).cast("B"), np.uint8)


@dataclass(frozen=True)
class GpuArray:
    """A contiguous array in device memory."""

    device: GpuDevice
    memory: Memory
    shape: tuple[int, ...]
    dtype: np.dtype[Any]

    @property
    def address(self) -> int:
        return self.memory.address

    @property
    def strides(self) -> tuple[int, ...]:
        sizes = [self.dtype.itemsize]
        for length in reversed(self.shape[1:]):
            sizes.append(sizes[-1] * length)
        return tuple(reversed(sizes))

    def numpy(self) -> NDArray[Any]:
        """A copy on the host, after what is queued on the device's stream."""
        self.device.synchronize()
        host = np.empty(self.shape, self.dtype)
        if host.nbytes:
            self.device.driver.call("cuMemcpyDtoH_v2", host.ctypes.data, self.address, host.nbytes)
        return host


class GpuDevice(Closing):
    """One GPU. Its context is current in the thread that makes this, which is the one to use it.
    PaError (NO_DEVICE) where there is none."""

    def __init__(self, ordinal: int = 0) -> None:
        self.driver = CudaDriver()  # first: without one, the library need not be compiled
        self.handle = ctypes.c_void_p()
        binding.call("pa_cuda_open", ordinal, ctypes.byref(self.handle))
        self._alive = [True]
        self._ordinal = self.driver.number("cuDeviceGet", ordinal)
        context = self.driver.handle("cuDevicePrimaryCtxRetain", self._ordinal)
        self.driver.call("cuCtxSetCurrent", context)
        self.stream: Stream = self.driver.handle("cuStreamCreate", cuda_driver.NON_BLOCKING)

    def close(self) -> None:
        """After its plans and rings. Memory that is still held goes with the context."""
        self._alive[0] = False
        self.driver.try_call("cuStreamDestroy_v2", self.stream)
        self.driver.try_call("cuDevicePrimaryCtxRelease_v2", self._ordinal)
        binding.load().pa_cuda_close(self.handle)
        self.handle = ctypes.c_void_p()

    # ---- what it is
    @property
    def arch(self) -> int:
        """Compute capability x 10."""
        return int(binding.load().pa_cuda_arch(self.handle))

    @property
    def name(self) -> str:
        text = ctypes.create_string_buffer(256)
        self.driver.call("cuDeviceGetName", text, len(text), self._ordinal)
        return text.value.decode(errors="replace")

    @property
    def driver_version(self) -> tuple[int, int]:
        """The CUDA version that the driver is for."""
        version = self.driver.number("cuDriverGetVersion")
        return version // 1000, version % 1000 // 10

    @property
    def memory_bytes(self) -> int:
        size = ctypes.c_size_t()
        self.driver.call("cuDeviceTotalMem_v2", ctypes.byref(size), self._ordinal)
        return size.value

    def attribute(self, name: str) -> int:
        """One of cuda_driver.ATTRIBUTES."""
        which = cuda_driver.ATTRIBUTES[name]
        return self.driver.number("cuDeviceGetAttribute", which, self._ordinal)

    # ---- memory
    def alloc(self, n_bytes: int) -> Memory:
        at = ctypes.c_uint64()
        self.driver.call("cuMemAlloc_v2", ctypes.byref(at), max(n_bytes, 1))
        return Memory(at.value, n_bytes, self._freeing("cuMemFree_v2", at.value))

    def pinned(self, n_bytes: int) -> Pinned:
        at = self.driver.handle("cuMemHostAlloc", n_bytes, 0).value or 0
        return Pinned(at, n_bytes, self._freeing("cuMemFreeHost", at))

    def empty(self, shape: tuple[int, ...], dtype: DTypeLike) -> GpuArray:
        kind = np.dtype(dtype)
        return GpuArray(self, self.alloc(math.prod(shape) * kind.itemsize), shape, kind)

    def upload(self, host: NDArray[Any]) -> GpuArray:
        host = np.ascontiguousarray(host)
        made = self.empty(host.shape, host.dtype)
        if host.nbytes:
            self.driver.call("cuMemcpyHtoD_v2", made.address, host.ctypes.data, host.nbytes)
        return made

    def _freeing(self, call: str, address: int) -> Callable[[], None]:
        driver, alive = self.driver, self._alive

        def free() -> None:
            if alive[0]:  # else the address is somebody else's by now
                driver.try_call(call, address)

        return free

    # ---- time
    def synchronize(self, stream: Stream | None = None) -> None:
        """Waits for a stream. PaError when a kernel on it failed."""
        binding.call("pa_cuda_synchronize", self.handle, stream or self.stream)

    def seconds(self, work: Callable[[], None], repeats: int) -> float:
        """Best time of what `work` queues on the stream, after one run that is not counted."""
        work()
        begin, end = (self.driver.handle("cuEventCreate", 0) for _ in range(2))
        best = math.inf
        try:
            for _ in range(repeats):
                self.driver.call("cuEventRecord", begin, self.stream)
                work()
                self.driver.call("cuEventRecord", end, self.stream)
                self.synchronize()
                took_ms = ctypes.c_float()
                self.driver.call("cuEventElapsedTime", ctypes.byref(took_ms), begin, end)
                best = min(best, took_ms.value / 1e3)
        finally:
            for event in (begin, end):
                self.driver.try_call("cuEventDestroy_v2", event)
        return best

    def graph(self, work: Callable[[], None]) -> Graph:
        """What `work` queues, to be queued again by one call, without Python between kernels."""
        mode = cuda_driver.CAPTURE_THREAD_LOCAL
        self.driver.call("cuStreamBeginCapture_v2", self.stream, mode)
        captured = ctypes.c_void_p()
        try:
            work()
        except BaseException:
            self.driver.try_call("cuStreamEndCapture", self.stream, ctypes.byref(captured))
            raise
        self.driver.call("cuStreamEndCapture", self.stream, ctypes.byref(captured))
        return Graph(self, captured)


class Graph:
    """Captured work; close it before the device."""

    def __init__(self, device: GpuDevice, captured: ctypes.c_void_p) -> None:
        self._device, self._captured = device, captured
        driver = device.driver
        self._ready = driver.handle("cuGraphInstantiateWithFlags", captured, 0)

    def launch(self) -> None:
        self._device.driver.call("cuGraphLaunch", self._ready, self._device.stream)

    def close(self) -> None:
        self._device.driver.try_call("cuGraphExecDestroy", self._ready)
        self._device.driver.try_call("cuGraphDestroy", self._captured)
