"""Which cells a query sees: dense, or by position. None stands for every cell."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ollama_tiering.kernels.binding import PaError, PaMask, PaStatus, address

HIDDEN = -65504.0  # this f16 and anything below hides a cell


def _check_int32(name: str, values: NDArray[Any]) -> None:
    if values.dtype != np.int32 or values.ndim != 1 or not values.flags.c_contiguous:
        raise PaError(PaStatus.BAD_ARGUMENT, f"{name} is int32, one axis, contiguous")


def _check_length(name: str, values: NDArray[Any], length: int) -> None:
    if len(values) != length:
        raise PaError(PaStatus.BAD_ARGUMENT, f"{name} has {len(values)} values, not {length}")


@dataclass(frozen=True, slots=True)
class DenseMask:
    """`values` f16 [n_q, n_cells] are added to the logits; -inf or <= -65504 hides the cell.

    `cell_pos` int32 [n_cells], on the CPU only: the order of the sums, whose last bits then do
    not depend on where cells lie (docs/attention/exact.md). None: the order of the cells.
    """

    values: NDArray[np.float16]
    cell_pos: NDArray[np.int32] | None = None

    def __post_init__(self) -> None:
        if self.values.dtype != np.float16 or self.values.ndim != 2:
            raise PaError(PaStatus.BAD_ARGUMENT, "a dense mask is f16 [n_q, n_cells]")
        if self.values.shape[1] > 1 and self.values.strides[1] != 2:
            raise PaError(PaStatus.BAD_ARGUMENT, "the rows of a dense mask are not contiguous")
        if self.cell_pos is not None:
            _check_int32("cell_pos", self.cell_pos)

    @classmethod
    def of(cls, seen: NDArray[np.bool_]) -> DenseMask:
        """`seen` [n_q, n_cells]: True where the query sees the cell."""
        return cls(np.where(seen, np.float16(0), np.float16(-np.inf)))

    def check(self, n_q: int, n_cells: int) -> None:
        if self.values.shape != (n_q, n_cells):
            raise PaError(
                PaStatus.BAD_ARGUMENT,
                f"the mask is {list(self.values.shape)}, the run [{n_q}, {n_cells}]",
            )
        if self.cell_pos is not None:
            _check_length("cell_pos", self.cell_pos, n_cells)

    def c(self) -> PaMask:
        return PaMask(
            dense=address(self.values),
            dense_stride=self.values.strides[0],
            cell_pos=address(self.cell_pos),
        )

    def bias(self, n_q: int, n_cells: int) -> NDArray[np.float64]:
        """What is added to each logit: [n_q, n_cells], -inf where hidden."""
        values = self.values.astype(np.float64)
        return np.where(values <= HIDDEN, -np.inf, values)


@dataclass(frozen=True, slots=True)
class PositionMask:
    """A query sees the cells of its sequence at 0 <= position <= its own, within the window.

    cell_pos, cell_seq    int32 [n_cells]; a negative position is an empty cell
    query_pos, query_seq  int32 [n_q]
    window                query_pos - cell_pos < window; 0: no window
    """

    cell_pos: NDArray[np.int32]
    query_pos: NDArray[np.int32]
    cell_seq: NDArray[np.int32] | None = None
    query_seq: NDArray[np.int32] | None = None
    window: int = 0

    def __post_init__(self) -> None:
        for name in ("cell_pos", "query_pos", "cell_seq", "query_seq"):
            values = getattr(self, name)
            if values is not None:
                _check_int32(name, values)

    @classmethod
    def causal(cls, n_q: int, n_cells: int, *, window: int = 0) -> PositionMask:
        """Cell c is position c; the queries are the last `n_q` positions."""
        cells = np.arange(n_cells, dtype=np.int32)
        return cls(cells, np.arange(n_cells - n_q, n_cells, dtype=np.int32), window=window)

    def check(self, n_q: int, n_cells: int) -> None:
        for name, length in (
            ("cell_pos", n_cells),
            ("cell_seq", n_cells),
            ("query_pos", n_q),
            ("query_seq", n_q),
        ):
            values: NDArray[Any] | None = getattr(self, name)
            if values is not None:
                _check_length(name, values, length)

    def c(self) -> PaMask:
        return PaMask(
            cell_pos=address(self.cell_pos),
            cell_seq=address(self.cell_seq),
            query_pos=address(self.query_pos),
            query_seq=address(self.query_seq),
            window=self.window,
        )

    def bias(self, n_q: int, n_cells: int) -> NDArray[np.float64]:
        """What is added to each logit: [n_q, n_cells], -inf where hidden."""
        cell, query = self.cell_pos[None, :].astype(int), self.query_pos[:, None].astype(int)
        seen = (cell >= 0) & (cell <= query)
        if self.window:
            seen &= query - cell < self.window
        if self.cell_seq is not None and self.query_seq is not None:
            seen &= self.cell_seq[None, :] == self.query_seq[:, None]
        return np.where(seen, 0.0, -np.inf)


Mask = DenseMask | PositionMask
