"""Cold pages through the delivery ring: pinned host memory to VRAM ahead of its use."""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from ollama_tiering.kernels import cuda_binding as binding
from ollama_tiering.kernels.gpu import GpuDevice, GpuRows, cupy


@dataclass(frozen=True)
class ColdRun:
    """A run of cells in pinned memory: K of all cells, then V, in one piece."""

    memory: Any  # cupy.cuda.PinnedMemoryPointer
    n_cells: int
    k_bytes: int  # where V begins
    n_bytes: int


class GpuRing:
    """`n_slots` (3 or more) buffers of `slot_bytes`. Close it before the device."""

    def __init__(self, device: GpuDevice, n_slots: int, slot_bytes: int) -> None:
        self._ring = ctypes.c_void_p()
        self.n_slots = n_slots
        binding.call(
            "pa_cuda_ring_create", device.handle, n_slots, slot_bytes, ctypes.byref(self._ring)
        )

    def close(self) -> None:
        binding.load().pa_cuda_ring_destroy(self._ring)
        self._ring = ctypes.c_void_p()

    def slot(self, piece: int) -> int:
        """The device address that a piece goes to."""
        return int(binding.load().pa_cuda_ring_slot(self._ring, piece))

    def deliver(self, runs: list[ColdRun], use: Callable[[int], None]) -> None:
        """One token: `use(i)` queues on the current stream what reads run i. Returns when all is
        queued, not when it has run."""
        pieces = (binding.Piece * len(runs))(
            *(binding.Piece(run.memory.ptr, run.n_bytes) for run in runs)
        )
        stream = cupy().cuda.get_current_stream().ptr
        binding.call("pa_cuda_ring_begin", self._ring, pieces, len(runs))
        try:
            for i in range(len(runs)):
                binding.call("pa_cuda_ring_acquire", self._ring, i, stream)
                use(i)
                binding.call("pa_cuda_ring_release", self._ring, i, stream)
        except BaseException:
            binding.load().pa_cuda_ring_end(self._ring)  # copies stop; the error at hand goes on
            raise
        binding.call("pa_cuda_ring_end", self._ring)

    def tables(self, runs: list[ColdRun]) -> list[tuple[Any, Any]]:
        """Page tables (one page: the slot) of K and V of each run, made before the token."""
        xp = cupy()
        addresses = [self.slot(i) for i in range(len(runs))]
        return [
            (xp.asarray([at], dtype="uint64"), xp.asarray([at + run.k_bytes], dtype="uint64"))
            for at, run in zip(addresses, runs, strict=True)
        ]


def staged_rows(table: Any, n_cells: int, n_kv_head: int, row_bytes: int) -> GpuRows:
    """Rows of a staged run: cells one after another, heads within a cell."""
    return GpuRows(table, n_cells, n_kv_head * row_bytes, row_bytes)
