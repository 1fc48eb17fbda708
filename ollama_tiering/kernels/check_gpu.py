"""The GPU among the devices that `kernel check` compares with the reference."""

from __future__ import annotations

import ctypes
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from ollama_tiering.errors import TieringError
from ollama_tiering.kernels import gpu
from ollama_tiering.kernels.rows import Rows
from ollama_tiering.kernels.samples import Sample

GPU_BOUND: Final = 1e-4
_REPEATS: Final = 3
_SLOTS: Final = 64  # states that may be kept of one query and head
_ALIGN_BYTES: Final = 16
_ALIGN_BLOCKS_BYTES: Final = 2  # rows of 18 or 34 bytes a block start at even addresses only


class Gpu:
    """The first GPU of this machine. Needs CuPy."""

    bound = GPU_BOUND

    def __init__(self) -> None:
        """PaError (NO_DEVICE) or MissingTool where there is none to be had."""
        gpu.cupy()
        self._device = gpu.GpuDevice()
        self.name = f"GPU, CC {self._device.arch / 10:.1f}"

    def compute(self, sample: Sample) -> tuple[NDArray[np.float32], float]:
        """PaError (UNSUPPORTED) where no kernel serves the shape."""
        xp, problem = gpu.cupy(), sample.problem
        out = np.full((problem.n_q, problem.n_head, problem.d_v), np.nan, np.float32)
        k, v = _on_gpu(xp, sample.k), _on_gpu(xp, sample.v)
        sinks = None if sample.sinks is None else xp.asarray(sample.sinks)
        blocks = max(problem.k_type.block_values, problem.v_type.block_values) > 1
        align = _ALIGN_BLOCKS_BYTES if blocks else _ALIGN_BYTES
        seconds = []
        with gpu.GpuAttention(
            problem.shape, n_slots=_SLOTS, align=align, device=self._device
        ) as plan:
            for _ in range(_REPEATS):
                took = 0.0
                for queries, n_cells in problem.batches():
                    q = xp.asarray(sample.q[queries])
                    mask = sample.mask(queries, n_cells)
                    masks: dict[str, Any] = {}
                    if mask is not None:
                        masks = {
                            "cell_pos": xp.asarray(mask.cell_pos),
                            "query_pos": xp.asarray(mask.query_pos),
                            "window": mask.window,
                        }
                    begin, end = xp.cuda.Event(), xp.cuda.Event()
                    begin.record()
                    result = plan.run(q, k, v, n_cells, sinks, **masks)
                    end.record()
                    end.synchronize()
                    took += xp.cuda.get_elapsed_time(begin, end) / 1e3
                    out[queries] = xp.asnumpy(result)
                seconds.append(took)
        return out, min(seconds)


def _on_gpu(xp: Any, rows: Rows) -> gpu.GpuRows:
    slots = range(rows.n_pages) if rows.table is None else rows.table
    pages = [xp.asarray(np.ascontiguousarray(rows.data[int(slot)])) for slot in slots]
    _, page_cells, n_head, row_bytes = rows.data.shape
    return gpu.GpuRows.of_pages(pages, page_cells, n_head * row_bytes, row_bytes)


def gpu_devices() -> tuple[list[Gpu], str]:
    """The GPUs, and why there is none where there is none."""
    try:
        ctypes.CDLL("libcuda.so.1")
    except OSError:
        return [], "there is no NVIDIA driver (libcuda.so.1) on this machine"
    try:
        return [Gpu()], ""
    except TieringError as error:
        return [], error.message
