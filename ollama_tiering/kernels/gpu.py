"""Attention on a GPU from Python.

    with GpuDevice() as device, GpuAttention(shape, device, n_slots=64, align=16) as attention:
        out = attention.run(q, k, v, n_cells, cell_pos=cell_pos, query_pos=query_pos).numpy()

Needs NVRTC (the `cuda` extra) and an NVIDIA GPU with its driver; importing this module needs
neither. Arrays are in device memory (gpu_device.py); work is queued on the device's stream.
"""

from __future__ import annotations

import ctypes
from dataclasses import dataclass, field
from types import TracebackType
from typing import Any, Self

import numpy as np
from numpy.typing import NDArray

from ollama_tiering.kernels import cuda_binding as binding
from ollama_tiering.kernels import nvrtc
from ollama_tiering.kernels.binding import PaArgs, PaError, PaMask, PaRows, PaStatus
from ollama_tiering.kernels.gpu_device import GpuArray, GpuDevice, Memory, Stream
from ollama_tiering.kernels.shape import Shape

MOST_SPLITS = 512  # of one run


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

    table: GpuArray  # uint64 [n_pages], device addresses
    page_cells: int
    cell_stride: int  # bytes
    head_stride: int  # bytes
    align: int  # bytes that every page's address is a multiple of, up to 16
    keep: list[Memory] = field(default_factory=list)

    @classmethod
    def at(
        cls,
        device: GpuDevice,
        addresses: list[int],
        page_cells: int,
        cell_stride: int,
        head_stride: int,
        keep: list[Memory] | None = None,
    ) -> GpuRows:
        """Pages at these device addresses."""
        table = device.upload(np.array(addresses, np.uint64))
        align = min([16, *(address & -address for address in addresses if address)])
        return cls(table, page_cells, cell_stride, head_stride, align, keep or [])

    @classmethod
    def of_pages(cls, device: GpuDevice, pages: list[NDArray[np.uint8]]) -> GpuRows:
        """Copies of pages [page_cells, n_kv_head, row_bytes], each in memory of its own."""
        memory = [device.upload(page).memory for page in pages]
        page_cells, n_head, row_bytes = pages[0].shape
        addresses = [m.address for m in memory]
        return cls.at(device, addresses, page_cells, n_head * row_bytes, row_bytes, memory)

    def struct(self, align: int) -> PaRows:
        """PaError if a page does not begin at a multiple of `align` bytes: the kernels would read
        it all the same, and the fault would end the whole context.
        """
        if self.align % align:
            raise PaError(
                PaStatus.BAD_ARGUMENT, f"pages at multiples of {self.align} bytes, not of {align}"
            )
        (n_pages,) = self.table.shape
        return PaRows(
            self.table.address, n_pages, self.page_cells, self.cell_stride, self.head_stride
        )


def _mask(window: int, masks: dict[str, GpuArray]) -> PaMask:
    mask = PaMask(window=window)
    for name, array in masks.items():
        setattr(mask, name, array.address)
        if name == "dense":
            mask.dense_stride = array.strides[0]
    return mask


class GpuAttention:
    """A plan with its image. Not thread-safe; close it (or use `with`) before the device."""

    def __init__(self, shape: Shape, device: GpuDevice, *, n_slots: int, align: int = 16) -> None:
        self.shape, self.device = shape, device
        self._plan = ctypes.c_void_p()
        self.image = nvrtc.image(instance_of(shape, align), device.arch)
        self._align = {
            side: align if dtype.block_values > 1 else 16
            for side, dtype in (("k", shape.k_type), ("v", shape.v_type))
        }
        binding.call(
            "pa_cuda_plan_create",
            device.handle,
            ctypes.byref(shape.c()),
            n_slots,
            self.image.cubin,
            len(self.image.cubin),
            ctypes.byref(self._plan),
        )

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close(wait=error is None)

    def close(self, *, wait: bool = True) -> None:
        """`wait` False: it does not ask whether what was queued has succeeded."""
        try:
            if wait:
                self.device.synchronize()
        finally:
            binding.load().pa_cuda_plan_destroy(self._plan)
            self._plan = ctypes.c_void_p()

    def splits(self, n_q: int, n_cells: int) -> int:
        return int(binding.load().pa_cuda_splits(self._plan, n_q, n_cells, MOST_SPLITS))

    def decode_rows(self, most: int) -> None:
        """Runs of more rows (queries x heads of a group) take tensor cores where both are there."""
        binding.call("pa_cuda_decode_rows", self._plan, most)

    def prepare(self, n_cells: int, **masks: GpuArray) -> None:
        """Once for all layers that run with these masks: `attend` queues it for each one else."""
        stream = self.device.stream
        mask = ctypes.byref(_mask(0, masks))
        binding.call("pa_cuda_prepare", self._plan, mask, n_cells, stream)

    def attend(
        self,
        q: GpuArray,
        k: GpuRows,
        v: GpuRows,
        n_cells: int,
        *,
        first: int = 0,
        n_splits: int = 1,
        join: bool = False,
        window: int = 0,
        stream: Stream | None = None,
        **masks: GpuArray,
    ) -> None:
        """Queues the states over k's and v's cells into slots. q: f32 [n_q, n_head, d_k].
        masks: dense (f16 bits, [n_q, n_cells]), cell_pos, cell_seq, query_pos, query_seq (int32).
        """
        args = PaArgs(
            n_q=q.shape[0],
            n_cells=n_cells,
            q=q.address,
            q_stride=q.strides[0],
            q_head_stride=q.strides[1],
            k=k.struct(self._align["k"]),
            v=v.struct(self._align["v"]),
            mask=_mask(window, masks),
        )
        where = stream or self.device.stream
        binding.call("pa_cuda_attend", self._plan, ctypes.byref(args), first, n_splits, join, where)

    def combine(
        self,
        n_q: int,
        n_slots: int,
        sinks: GpuArray | None = None,
        out: GpuArray | None = None,
    ) -> GpuArray:
        """The output of slots 0 .. n_slots - 1: f32 [n_q, n_head, d_v]."""
        out = out or self.device.empty((n_q, self.shape.n_head, self.shape.d_v), np.float32)
        at = None if sinks is None else sinks.address
        stream = self.device.stream
        binding.call("pa_cuda_combine", self._plan, n_q, n_slots, at, out.address, stream)
        return out

    def run(
        self,
        q: GpuArray,
        k: GpuRows,
        v: GpuRows,
        n_cells: int,
        sinks: GpuArray | None = None,
        out: GpuArray | None = None,
        **masks: Any,
    ) -> GpuArray:
        """Attention over all cells: as many splits as fill the GPU, then their combination."""
        n_splits = self.splits(q.shape[0], n_cells)
        self.attend(q, k, v, n_cells, n_splits=n_splits, **masks)
        return self.combine(q.shape[0], n_splits, sinks, out)
