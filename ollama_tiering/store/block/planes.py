"""Byte planes: of elements of w bytes, first all their lowest bytes, ... , last all their highest.

In K/V rows the high bytes (sign, exponent) repeat and the low ones (mantissa) do not: apart, the
former compress. Two-byte elements go through 16-bit arithmetic, which numpy does with the vector
unit: 4 and 2 times as fast as strided copies of bytes (docs/measurements/encoding.md). Pure; numpy
releases the interpreter lock in all of it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, Final

import numpy as np
from numpy.typing import NDArray

if TYPE_CHECKING:
    from typing_extensions import Buffer

Bytes = NDArray[np.uint8]

_ELEMENT_BYTES: Final[Mapping[str, int]] = {"f16": 2, "bf16": 2, "f32": 4}
_PART_ELEMENTS: Final = 64 << 10  # so that a part's temporaries stay in the L2 cache


def plane_sizes(dtype: str, raw_bytes: int) -> list[int]:
    """Bytes of each plane. What is left of a last, incomplete element is a plane of its own."""
    width = _ELEMENT_BYTES.get(dtype, 1)
    elements, rest = divmod(raw_bytes, width)
    return [size for size in (*[elements] * width, rest) if size]


def split(raw: Buffer, dtype: str) -> list[Bytes]:
    """The planes of `raw`, lowest byte first."""
    data: Bytes = np.frombuffer(memoryview(raw), np.uint8)
    width = _ELEMENT_BYTES.get(dtype, 1)
    cut = data.size // width * width
    whole, rest = data[:cut], data[cut:]
    planes: list[Bytes] = []
    if width == 2 and whole.size:
        planes = _split_pairs(whole.view("<u2"))
    elif whole.size:
        planes = [np.ascontiguousarray(whole[at::width]) for at in range(width)]
    return [*planes, rest] if rest.size else planes


def join(
    planes: Sequence[Buffer], dtype: str, raw_bytes: int, scratch: Bytes | None = None
) -> Bytes:
    """The opposite of `split`; the planes have the sizes that `plane_sizes` says.

    What is returned lies in `scratch` where that is large enough: memory that is used again is much
    faster than fresh memory, whose every page is a fault.
    """
    width = _ELEMENT_BYTES.get(dtype, 1)
    if scratch is None or scratch.size < raw_bytes:
        scratch = np.empty(raw_bytes, np.uint8)
    out = scratch[:raw_bytes]
    whole = out[: raw_bytes // width * width]
    parts = [np.frombuffer(memoryview(plane), np.uint8) for plane in planes]
    if width == 2 and whole.size:
        _join_pairs(parts[0], parts[1], whole.view("<u2"))
    elif whole.size:
        for at in range(width):
            whole[at::width] = parts[at]
    if whole.size < raw_bytes:
        out[whole.size :] = parts[-1]
    return out


def _split_pairs(pairs: NDArray[Any]) -> list[Bytes]:
    low: Bytes = np.empty(pairs.size, np.uint8)
    high: Bytes = np.empty(pairs.size, np.uint8)
    for start in range(0, pairs.size, _PART_ELEMENTS):
        part = pairs[start : start + _PART_ELEMENTS]
        np.copyto(low[start : start + part.size], part, casting="unsafe")  # keeps the low byte
        np.copyto(high[start : start + part.size], part >> 8, casting="unsafe")
    return [low, high]


def _join_pairs(low: Bytes, high: Bytes, pairs: NDArray[Any]) -> None:
    for start in range(0, pairs.size, _PART_ELEMENTS):
        part = pairs[start : start + _PART_ELEMENTS]
        # A product, not a shift: numpy then widens and multiplies in one pass.
        np.multiply(high[start : start + part.size], np.uint16(256), out=part, dtype=np.uint16)
        np.bitwise_or(part, low[start : start + part.size], out=part)
