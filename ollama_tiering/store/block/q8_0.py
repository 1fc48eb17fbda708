"""ggml's q8_0 on f16 rows: blocks of 32 elements share a scale. Lossy, once; pure.

`round_rows` is the loss: quantise and back, by ggml's rule (ggml-quants.c, quantize_row_q8_0_ref:
d = max|x| / 127, q = round half away from zero of x / d, d kept as f16). What it gives is written
wherever the rows go, so every copy of a block has the same bytes. `codes_of` and `rows_of` are a
lossless encoding of rows that have been rounded: 34 bytes for 64.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final

import numpy as np
from numpy.typing import NDArray

if TYPE_CHECKING:
    from typing_extensions import Buffer

Bytes = NDArray[np.uint8]

ELEMENTS: Final = 32  # that share a scale
RAW_BYTES: Final = 2 * ELEMENTS
CODE_BYTES: Final = 2 + ELEMENTS
DTYPE: Final = "f16"

_BLOCK: Final = np.dtype([("scale", "<f2"), ("codes", "i1", ELEMENTS)])
# The scale of rounded rows is found again from their maximum, which was rounded itself: off by so
# many steps of f16 at most, in the order of how often.
_STEPS: Final = (0, -1, 1, -2, 2)


def round_rows(raw: Buffer) -> Bytes | None:
    """The rows as q8_0 has them; None when they cannot be: not whole blocks, not finite."""
    values = _values(raw)
    if values is None:
        return None
    scales = np.abs(values).max(axis=1, keepdims=True) / np.float32(127)
    rounded = _rows(_codes(values, scales), scales.astype(np.float16))
    return rounded.view(np.uint8).reshape(-1) if np.isfinite(rounded).all() else None


def codes_of(raw: Buffer) -> Bytes | None:
    """The q8_0 blocks whose rows are exactly these; None when there are none."""
    values = _values(raw)
    if values is None:
        return None
    wanted = np.frombuffer(memoryview(raw), np.uint16).reshape(-1, ELEMENTS)
    out = np.zeros(len(values), _BLOCK)
    nearest = (np.abs(values).max(axis=1, keepdims=True) / np.float32(127)).astype(np.float16)
    left = np.arange(len(values))
    for step in _STEPS:
        # Neighbouring positive f16 values are neighbouring integers.
        bits = nearest[left].view(np.uint16).astype(np.int32) + step
        scales = np.clip(bits, 0, 0x7BFF).astype(np.uint16).view(np.float16)
        codes = _codes(values[left], scales.astype(np.float32))
        same = (_rows(codes, scales).view(np.uint16) == wanted[left]).all(axis=1)
        out["scale"][left[same]] = scales[same, 0]
        out["codes"][left[same]] = codes[same]
        left = left[~same]
        if not left.size:
            return out.view(np.uint8).reshape(-1)
    return None


def rows_of(codes: Buffer) -> Bytes:
    """The f16 rows of whole q8_0 blocks."""
    blocks = np.frombuffer(memoryview(codes), _BLOCK)
    return _rows(blocks["codes"], blocks["scale"][:, None]).view(np.uint8).reshape(-1)


def _values(raw: Buffer) -> NDArray[np.float32] | None:
    view = memoryview(raw).cast("B")
    if not view.nbytes or view.nbytes % RAW_BYTES:
        return None
    values = np.frombuffer(view, np.float16).astype(np.float32).reshape(-1, ELEMENTS)
    return values if np.isfinite(values).all() else None


def _codes(values: NDArray[np.float32], scales: NDArray[np.float32]) -> NDArray[np.int8]:
    with np.errstate(divide="ignore", over="ignore", invalid="ignore"):
        scaled = values * np.where(scales == 0, np.float32(0), np.float32(1) / scales)
    scaled += np.copysign(np.float32(0.5), scaled)
    np.trunc(scaled, out=scaled)
    np.nan_to_num(scaled, copy=False)
    return np.clip(scaled, -127, 127, out=scaled).astype(np.int8)


def _rows(codes: NDArray[np.int8], scales: NDArray[np.float16]) -> NDArray[Any]:
    with np.errstate(over="ignore"):
        return (codes * scales.astype(np.float32)).astype("<f2")
