"""Cold pages through the delivery ring: pinned host memory to VRAM ahead of its use."""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from dataclasses import dataclass

from ollama_tiering.kernels import cuda_binding as binding
from ollama_tiering.kernels.gpu import GpuRows
from ollama_tiering.kernels.gpu_device import GpuDevice, Pinned
from ollama_tiering.system.closing import Closing


@dataclass(frozen=True)
class ColdRun:
    """A run of cells in pinned memory: K of all cells, then V, in one piece."""

    memory: Pinned
    n_cells: int
    k_bytes: int  # where V begins
    n_bytes: int


class GpuRing(Closing):
    """`n_slots` (3 or more) buffers of `slot_bytes` each. Close it before the device."""

    def __init__(self, device: GpuDevice, n_slots: int, slot_bytes: int) -> None:
        self._device = device
        self._ring = ctypes.c_void_p()
        self.n_slots = n_slots
        binding.call(
            "pa_cuda_ring_create", device.handle, n_slots, slot_bytes, ctypes.byref(self._ring)
        )

    def close(self) -> None:
        binding.load().pa_cuda_ring_destroy(self._ring)
        self._ring = ctypes.c_void_p()

    def slot(self, piece: int) -> int:
        """The device address to which a piece goes."""
        return int(binding.load().pa_cuda_ring_slot(self._ring, piece))

    def deliver(self, runs: list[ColdRun], use: Callable[[int], None]) -> None:
        """One token: `use(i)` queues on the device's stream what reads run i. Returns when all is
        queued, not when it has run: the runs' memory stays as it is until `wait`."""
        pieces = (binding.Piece * len(runs))(
            *(binding.Piece(run.memory.address, run.n_bytes) for run in runs)
        )
        stream = self._device.stream
        try:
            binding.call("pa_cuda_ring_begin", self._ring, pieces, len(runs))
            for i in range(len(runs)):
                binding.call("pa_cuda_ring_acquire", self._ring, i, stream)
                use(i)
                binding.call("pa_cuda_ring_release", self._ring, i, stream)
        except BaseException:
            binding.load().pa_cuda_ring_end(self._ring)  # copies stop; the error at hand goes on
            raise
        binding.call("pa_cuda_ring_end", self._ring)

    def wait(self) -> None:
        """Returns when every copy has ended."""
        binding.call("pa_cuda_ring_wait", self._ring)

    def rows(self, runs: list[ColdRun], row_bytes: int, n_kv_head: int) -> list[KeysAndValues]:
        """Rows of each run where the ring puts them, one page each, made before the token: cells
        one after another, heads within a cell; K and V have rows of the same bytes."""

        def at(address: int, run: ColdRun) -> GpuRows:
            stride = n_kv_head * row_bytes
            return GpuRows.at(self._device, [address], run.n_cells, stride, row_bytes)

        starts = [self.slot(i) for i in range(len(runs))]
        return [
            (at(start, run), at(start + run.k_bytes, run))
            for start, run in zip(starts, runs, strict=True)
        ]


KeysAndValues = tuple[GpuRows, GpuRows]
