"""Attention on a GPU from Python: CuPy for memory and streams, the C API for everything else.

    with GpuAttention(shape, n_slots=64, align=16) as attention:
        out = attention.run(q, k, v, cell_pos=cell_pos, query_pos=query_pos)

Needs CuPy and NVRTC (the `cuda` extra) and an NVIDIA GPU; importing this module needs neither.
Arrays are CuPy's, on the GPU; work is queued on CuPy's current stream.
"""

from __future__ import annotations

import ctypes
from dataclasses import dataclass, field
from types import TracebackType
from typing import Any

from ollama_tiering import extras
from ollama_tiering.kernels import cuda_binding as binding
from ollama_tiering.kernels import nvrtc
from ollama_tiering.kernels.binding import PaArgs, PaMask, PaRows
from ollama_tiering.kernels.shape import Shape

Array = Any  # cupy.ndarray: CuPy is optional and has no types


def cupy() -> Any:
    """CuPy, or MissingTool."""
    try:
        import cupy as module
    except ImportError:
        raise extras.lacking("cuda") from None
    return module


def instance_of(shape: Shape, align: int) -> nvrtc.Instance:
    """The image that serves the shape: decode blocks of as many rows as one query has, 8 at most;
    more rows are spread evenly.
    """
    group = shape.n_head // shape.n_kv_head
    tiles = -(-group // 8)
    rows = -(-group // tiles)
    types = (shape.k_type.name.lower(), shape.v_type.name.lower())
    return nvrtc.Instance(shape.d_k, shape.d_v, *types, rows, align)


@dataclass(frozen=True)
class GpuRows:
    """Rows of K or V in pages on the GPU (`pa_rows`). `keep`: what must live as long as this."""

    table: Array  # uint64 [n_pages], device addresses
    page_cells: int
    cell_stride: int  # bytes
    head_stride: int  # bytes
    keep: list[Array] = field(default_factory=list)

    @classmethod
    def of_pages(
        cls, pages: list[Array], page_cells: int, cell_stride: int, head_stride: int
    ) -> GpuRows:
        table = cupy().asarray([page.data.ptr for page in pages], dtype="uint64")
        return cls(table, page_cells, cell_stride, head_stride, list(pages))

    def struct(self) -> PaRows:
        return PaRows(
            self.table.data.ptr,
            self.table.size,
            self.page_cells,
            self.cell_stride,
            self.head_stride,
        )


class GpuDevice:
    """One GPU, opened. PaError (NO_DEVICE) where there is none."""

    def __init__(self, ordinal: int = 0) -> None:
        self.handle = ctypes.c_void_p()
        binding.call("pa_cuda_open", ordinal, ctypes.byref(self.handle))

    @property
    def arch(self) -> int:
        """Compute capability x 10."""
        return int(binding.load().pa_cuda_arch(self.handle))

    def close(self) -> None:
        binding.load().pa_cuda_close(self.handle)
        self.handle = ctypes.c_void_p()


class GpuAttention:
    """A plan with its image. Not thread-safe; close it (or use `with`) before the device."""

    def __init__(
        self, shape: Shape, *, n_slots: int, align: int = 16, device: GpuDevice | None = None
    ) -> None:
        self.shape = shape
        self._own_device = device is None
        self.device = device or GpuDevice()
        self.n_slots = n_slots
        self._plan = ctypes.c_void_p()
        cubin = nvrtc.image(instance_of(shape, align), self.device.arch).cubin
        binding.call(
            "pa_cuda_plan_create",
            self.device.handle,
            ctypes.byref(shape.c()),
            n_slots,
            cubin,
            len(cubin),
            ctypes.byref(self._plan),
        )

    def __enter__(self) -> GpuAttention:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()

    def close(self) -> None:
        cupy().cuda.get_current_stream().synchronize()
        binding.load().pa_cuda_plan_destroy(self._plan)
        self._plan = ctypes.c_void_p()
        if self._own_device:
            self.device.close()

    def splits(self, n_q: int, n_cells: int) -> int:
        return int(binding.load().pa_cuda_splits(self._plan, n_q, n_cells, self.n_slots))

    def attend(
        self,
        q: Array,
        k: GpuRows,
        v: GpuRows,
        n_cells: int,
        *,
        first: int = 0,
        n_splits: int = 1,
        join: bool = False,
        window: int = 0,
        **masks: Array,
    ) -> None:
        """Queues the states over k's and v's cells into slots. q: f32 [n_q, n_head, d_k],
        contiguous. masks: dense (f16 bits, [n_q, n_cells]), cell_pos, cell_seq, query_pos,
        query_seq (int32)."""
        dense = masks.get("dense")
        addresses = {name: array.data.ptr for name, array in masks.items()}
        mask = PaMask(dense_stride=0 if dense is None else dense.strides[0], window=window)
        for name, address in addresses.items():
            setattr(mask, name, address)
        args = PaArgs(
            n_q=q.shape[0],
            n_cells=n_cells,
            q=q.data.ptr,
            q_stride=q.strides[0],
            q_head_stride=q.strides[1],
            k=k.struct(),
            v=v.struct(),
            mask=mask,
        )
        stream = cupy().cuda.get_current_stream().ptr
        binding.call(
            "pa_cuda_attend", self._plan, ctypes.byref(args), first, n_splits, join, stream
        )

    def combine(self, n_q: int, n_slots: int, sinks: Array | None = None) -> Array:
        """The output of slots 0 .. n_slots - 1: f32 [n_q, n_head, d_v]."""
        out = cupy().empty((n_q, self.shape.n_head, self.shape.d_v), dtype="float32")
        stream = cupy().cuda.get_current_stream().ptr
        at = None if sinks is None else sinks.data.ptr
        binding.call(
            "pa_cuda_combine", self._plan, n_q, n_slots, at, ctypes.c_void_p(out.data.ptr), stream
        )
        return out

    def run(
        self,
        q: Array,
        k: GpuRows,
        v: GpuRows,
        n_cells: int,
        sinks: Array | None = None,
        **masks: Any,
    ) -> Array:
        """Attention over all cells: as many splits as fill the GPU, then their combination."""
        n_splits = self.splits(q.shape[0], n_cells)
        self.attend(q, k, v, n_cells, n_splits=n_splits, **masks)
        return self.combine(q.shape[0], n_splits, sinks)
