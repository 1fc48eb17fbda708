"""Rows of K or of V on the host, in pages."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ollama_tiering.kernels.binding import PaError, PaRows, PaStatus
from ollama_tiering.kernels.quantise import quantise
from ollama_tiering.kernels.shape import Dtype


@dataclass(frozen=True)
class Rows:
    """Rows of K or of V, in pages. Not copied: `data` must not change during a run.

    data   uint8 [slots, page_cells, n_kv_head, row_bytes], any strides, the last axis contiguous
    dtype  how the bytes are read
    table  which slot holds page 0, 1, …, [n_pages] integers; None: the slots in their order
    """

    data: NDArray[np.uint8]
    dtype: Dtype
    table: NDArray[Any] | None = None

    def __post_init__(self) -> None:
        if self.data.dtype != np.uint8 or self.data.ndim != 4:
            raise PaError(
                PaStatus.BAD_ARGUMENT,
                "rows are uint8 [slots, page_cells, n_kv_head, row_bytes], "
                f"not {self.data.dtype} with {self.data.ndim} axes",
            )
        if self.data.shape[3] > 1 and self.data.strides[3] != 1:
            raise PaError(PaStatus.BAD_ARGUMENT, "the bytes of a row are not contiguous")
        if self.table is None:
            return
        if self.table.ndim != 1 or not np.issubdtype(self.table.dtype, np.integer):
            raise PaError(PaStatus.BAD_ARGUMENT, "a page table is one axis of integers")
        slots = self.data.shape[0]
        outside = self.table[(self.table < 0) | (self.table >= slots)]
        if outside.size:
            raise PaError(
                PaStatus.BAD_ARGUMENT,
                f"page {int(outside[0])} is out of range: there are {slots} pages",
            )

    @classmethod
    def of_values(
        cls,
        values: NDArray[np.float32],
        dtype: Dtype,
        *,
        page_cells: int | None = None,
        order: NDArray[Any] | None = None,
    ) -> Rows:
        """Rows that hold `values` [n_cells, n_head, d], stored as `dtype`, in pages of
        `page_cells` (None: one page). `order`: the slot of each page, a permutation.
        """
        rows = quantise(values, dtype)
        n_cells, n_head, row_bytes = rows.shape
        page_cells = page_cells or max(n_cells, 1)
        n_pages = -(-n_cells // page_cells)
        data = np.zeros((n_pages * page_cells, n_head, row_bytes), np.uint8)
        data[:n_cells] = rows
        paged = data.reshape(n_pages, page_cells, n_head, row_bytes)
        if order is None:
            return cls(paged, dtype)
        pool = np.empty_like(paged)
        pool[order] = paged
        return cls(pool, dtype, np.asarray(order))

    @property
    def n_pages(self) -> int:
        return len(self.data if self.table is None else self.table)

    @property
    def page_cells(self) -> int:
        return int(self.data.shape[1])

    @property
    def n_cells(self) -> int:
        """Cells that the pages have room for."""
        return self.n_pages * self.page_cells

    def cells(self, n_cells: int) -> NDArray[np.uint8]:
        """Copy of the first `n_cells` cells in order: [n_cells, n_kv_head, row_bytes]."""
        pages = self.data if self.table is None else self.data[self.table]
        return np.ascontiguousarray(pages.reshape(-1, *self.data.shape[2:])[:n_cells])

    @cached_property
    def addresses(self) -> NDArray[np.uintp]:
        """Says where each page lies: [n_pages]."""
        slots = np.arange(self.n_pages) if self.table is None else self.table.astype(np.int64)
        return (self.data.ctypes.data + slots * self.data.strides[0]).astype(np.uintp)

    def c(self) -> PaRows:
        """The C struct; it points into this object, which has to outlive it."""
        return PaRows(
            pages=self.addresses.ctypes.data if self.n_pages else None,
            n_pages=self.n_pages,
            page_cells=self.page_cells,
            cell_stride=self.data.strides[1],
            head_stride=self.data.strides[2],
        )
