"""f32 weights as Q4_K and Q6_K blocks.

The layouts are those of ggml (ggml-common.h `block_q4_K`, `block_q6_K`; ggml-quants.c says how they
are read), which the `gguf` package reads and cannot write. A block is 256 weights of one row. The
scales are taken from the extremes of each sub-block, without ggml's search for better ones: a
little less exact, the same bytes to read. Pure NumPy, a few million weights at a time.
"""

from __future__ import annotations

from typing import Final

import numpy as np
from numpy.typing import NDArray

BLOCK: Final = 256
BLOCK_BYTES: Final = {"q4_k": 144, "q6_k": 210}
_CHUNK_BLOCKS: Final = 2048  # what a processor's cache holds, about

Floats = NDArray[np.float32]
Bytes = NDArray[np.uint8]


def quantise(values: Floats, kind: str) -> Bytes:
    """Blocks of `kind`, `q4_k` or `q6_k`, in the order of the weights: (blocks, bytes of one).
    ValueError if a row is not a whole number of blocks.
    """
    if values.shape[-1] % BLOCK:
        raise ValueError(f"rows of {values.shape[-1]} weights are no whole blocks of {BLOCK}")
    blocks = values.reshape(-1, BLOCK)
    encode = {"q4_k": _q4_k, "q6_k": _q6_k}[kind]
    out = np.empty((len(blocks), BLOCK_BYTES[kind]), np.uint8)
    for start in range(0, len(blocks), _CHUNK_BLOCKS):
        chunk = slice(start, start + _CHUNK_BLOCKS)
        encode(blocks[chunk], out[chunk])
    return out


def _q4_k(blocks: Floats, out: Bytes) -> None:
    """x = d s q - dmin m: q of 4 bits, s and m of 6 bits for each 32 weights, d and dmin in f16."""
    x = blocks.reshape(-1, 8, 32)
    least = np.maximum(-x.min(-1), 0)  # m is not negative: 0 can always be said
    steps = (x.max(-1) + least) / np.float32(15)
    d, dmin = _f16(steps.max(-1) / np.float32(63)), _f16(least.max(-1) / np.float32(63))
    s, m = _rounded(steps, d, 0, 63), _rounded(least, dmin, 0, 63)
    scale, offset = d * s, dmin * m
    q = _rounded(x + offset[..., None], scale[..., None], 0, 15).astype(np.uint8)
    out[:, 0:2], out[:, 2:4] = _f16_bytes(d), _f16_bytes(dmin)
    scales, offsets = s.astype(np.uint8), m.astype(np.uint8)
    out[:, 4:8] = scales[:, :4] | (scales[:, 4:] >> 4) << 6
    out[:, 8:12] = offsets[:, :4] | (offsets[:, 4:] >> 4) << 6
    out[:, 12:16] = (scales[:, 4:] & 15) | (offsets[:, 4:] & 15) << 4
    out[:, 16:] = (q[:, 0::2] | q[:, 1::2] << 4).reshape(-1, 128)


def _q6_k(blocks: Floats, out: Bytes) -> None:
    """x = d s (q - 32): q of 6 bits, s a signed byte for each 16 weights, d in f16."""
    x = blocks.reshape(-1, 16, 16)
    steps = _extreme(x) / np.float32(-32)  # the end with one value more is for the largest weight
    d = _f16(_extreme(steps) / np.float32(-128))
    s = _rounded(steps, d, -128, 127)
    q = _rounded(x, (d * s)[..., None], -32, 31) + np.float32(32)
    # Half a block is 128 weights; four runs of 32 lie side by side in it.
    runs = q.astype(np.uint8).reshape(-1, 2, 4, 32)
    low, high = runs & 15, runs >> 4
    out[:, :128] = (low[:, :, :2] | low[:, :, 2:] << 4).reshape(-1, 128)
    both = high[:, :, 0] | high[:, :, 1] << 2 | high[:, :, 2] << 4 | high[:, :, 3] << 6
    out[:, 128:192] = both.reshape(-1, 64)
    out[:, 192:208] = s.astype(np.int8).view(np.uint8)
    out[:, 208:] = _f16_bytes(d)


def _rounded(x: Floats, step: Floats, least: int, most: int) -> Floats:
    """x in whole steps; 0 if the step is 0."""
    inverse = np.divide(1, step, out=np.zeros_like(step), where=step != 0)
    scaled = x * inverse
    np.rint(scaled, out=scaled)
    return np.clip(scaled, least, most, out=scaled)


def _extreme(x: Floats) -> Floats:
    """The value of the largest magnitude along the last axis, with its sign."""
    most, least = x.max(-1), x.min(-1)
    extreme: Floats = np.where(most > -least, most, least)
    return extreme


def _f16(x: Floats) -> Floats:
    """Rounded to f16, (n,) to (n, 1), so that the rest is computed with the values that are read
    back.
    """
    return x.astype(np.float16).astype(np.float32)[:, None]


def _f16_bytes(x: Floats) -> Bytes:
    return x.astype("<f2").view(np.uint8)
