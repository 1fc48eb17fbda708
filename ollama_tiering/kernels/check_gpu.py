"""The GPU among the devices that `kernel check` compares with the reference."""

from __future__ import annotations

from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from ollama_tiering.kernels import nvrtc
from ollama_tiering.kernels.binding import PaError, PaStatus
from ollama_tiering.kernels.gpu import GpuAttention, GpuRows
from ollama_tiering.kernels.gpu_device import GpuArray, GpuDevice
from ollama_tiering.kernels.rows import Rows
from ollama_tiering.kernels.samples import Problem, Sample

GPU_BOUND: Final = 1e-4
_REPEATS: Final = 3
_SLOTS: Final = 64  # states that may be kept of one query and head
_ALIGN_BYTES: Final = 16


class Gpu:
    """The first GPU of this machine, or the one given."""

    bound = GPU_BOUND

    def __init__(self, device: GpuDevice | None = None) -> None:
        """PaError where there is none to be had (NO_DEVICE) or it does not start; MissingTool where
        the compiler of its kernels is missing."""
        self.device = device or GpuDevice()
        nvrtc.compiler()
        self.name = f"GPU, CC {self.device.arch / 10:.1f}"

    def compute(self, sample: Sample) -> tuple[NDArray[np.float32], float]:
        """PaError (UNSUPPORTED) where no kernel serves the shape."""
        problem, device = sample.problem, self.device
        k, v = on_gpu(device, sample.k), on_gpu(device, sample.v)
        sinks = None if sample.sinks is None else device.upload(sample.sinks)
        batches = []
        for queries, n_cells in problem.batches():
            q = device.upload(sample.q[queries])
            out = device.empty((q.shape[0], problem.n_head, problem.d_v), np.float32)
            batches.append((q, n_cells, out, _masks(device, sample, queries, n_cells)))
        with GpuAttention(problem.shape, device, n_slots=_SLOTS, align=alignment(problem)) as plan:

            def work() -> None:
                for q, n_cells, out, masks in batches:
                    plan.run(q, k, v, n_cells, sinks, out, **masks)

            seconds = device.seconds(work, _REPEATS)
        return np.concatenate([out.numpy() for _, _, out, _ in batches]), seconds


def alignment(problem: Problem) -> int:
    """Bytes that the addresses of quantised rows are multiples of; 16 where there are none. Pages
    begin at multiples of 256, so the rows of a cell decide: 18 or 34 bytes a block."""
    row_bytes = [
        dtype.row_bytes(values)
        for dtype, values in ((problem.k_type, problem.d_k), (problem.v_type, problem.d_v))
        if dtype.block_values > 1
    ]
    return min([_ALIGN_BYTES, *(4 if n % 4 == 0 else 2 for n in row_bytes)])


def _masks(device: GpuDevice, sample: Sample, queries: slice, n_cells: int) -> dict[str, Any]:
    mask = sample.mask(queries, n_cells)
    if mask is None:
        return {}
    given: dict[str, GpuArray | int] = {"window": mask.window}
    for name, values in (("cell_pos", mask.cell_pos), ("query_pos", mask.query_pos)):
        given[name] = device.upload(np.asarray(values, np.int32))
    return given


def on_gpu(device: GpuDevice, rows: Rows) -> GpuRows:
    slots = range(rows.n_pages) if rows.table is None else rows.table
    return GpuRows.of_pages(device, [np.ascontiguousarray(rows.data[int(slot)]) for slot in slots])


def gpu_devices() -> tuple[list[Gpu], str]:
    """The GPUs, and why there is none where there is none. PaError or MissingTool where there is a
    driver, and the GPU cannot be used all the same."""
    try:
        device = GpuDevice()
    except PaError as error:
        if error.status is not PaStatus.NO_DEVICE:
            raise
        return [], error.message
    return [Gpu(device)], ""
