"""What attention is asked for: data types and the shape of a plan."""

from __future__ import annotations

import enum
from dataclasses import dataclass

from ollama_tiering.kernels.binding import PaError, PaShape, PaStatus

BLOCK_VALUES = 32  # of q8_0 and q4_0


class Dtype(enum.IntEnum):
    """How a value of K or V is stored; the numbers are `pa_dtype` of paged_attn.h."""

    F32 = 0
    F16 = 1
    BF16 = 2
    Q8_0 = 3
    Q4_0 = 4

    @property
    def block_bytes(self) -> int:
        """Bytes of one block of `block_values` values."""
        return (4, 2, 2, 34, 18)[self]

    @property
    def block_values(self) -> int:
        return BLOCK_VALUES if self in (Dtype.Q8_0, Dtype.Q4_0) else 1

    def row_bytes(self, values: int) -> int:
        """Bytes of a row of `values` values. PaError if they are not whole blocks."""
        if values % self.block_values:
            raise PaError(
                PaStatus.BAD_ARGUMENT,
                f"{self.name.lower()} rows are multiples of {self.block_values} values, "
                f"not {values}",
            )
        return values // self.block_values * self.block_bytes


@dataclass(frozen=True, slots=True)
class Shape:
    """What a plan is made for. `scale` multiplies q . k; None: 1/sqrt(d_k)."""

    n_head: int
    n_kv_head: int
    d_k: int
    d_v: int
    max_q: int
    max_cells: int
    k_type: Dtype = Dtype.F16
    v_type: Dtype = Dtype.F16
    scale: float | None = None
    softcap: float = 0.0

    @property
    def logit_scale(self) -> float:
        if self.scale is not None:
            return self.scale
        return float(self.d_k) ** -0.5 if self.d_k > 0 else 1.0

    def c(self) -> PaShape:
        """The C struct. PaError for numbers that do not fit into 32 bits."""
        for name in ("n_head", "n_kv_head", "d_k", "d_v", "max_q", "max_cells"):
            if not -(2**31) <= getattr(self, name) < 2**31:
                raise PaError(PaStatus.BAD_ARGUMENT, f"{name} does not fit into 32 bits")
        return PaShape(
            n_head=self.n_head,
            n_kv_head=self.n_kv_head,
            d_k=self.d_k,
            d_v=self.d_v,
            max_q=self.max_q,
            max_cells=self.max_cells,
            k_type=int(self.k_type),
            v_type=int(self.v_type),
            scale=self.logit_scale,
            softcap=self.softcap,
        )
