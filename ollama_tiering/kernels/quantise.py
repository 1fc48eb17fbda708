"""Values to the bytes of a K/V row and back, as ggml stores them (ggml-quants.c, v0.16.3).

q8_0: 32 values in f16 scale, int8[32]. q4_0: f16 scale, 16 bytes; value i in the low half of byte
i, value i + 16 in the high half, both with 8 added.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from ollama_tiering.kernels.shape import BLOCK_VALUES, Dtype


def quantise(values: NDArray[Any], dtype: Dtype) -> NDArray[np.uint8]:
    """[…, d] values -> uint8 […, row_bytes]. PaError if d is not whole blocks."""
    values = np.ascontiguousarray(values, np.float32)
    row_bytes = dtype.row_bytes(values.shape[-1])
    match dtype:
        case Dtype.F32:
            stored: NDArray[Any] = values
        case Dtype.F16:
            stored = values.astype(np.float16)
        case Dtype.BF16:
            stored = _to_bf16(values)
        case Dtype.Q8_0:
            stored = _to_q8_0(values.reshape(-1, BLOCK_VALUES))
        case Dtype.Q4_0:
            stored = _to_q4_0(values.reshape(-1, BLOCK_VALUES))
    return stored.view(np.uint8).reshape(*values.shape[:-1], row_bytes)


def dequantise(rows: NDArray[np.uint8], dtype: Dtype) -> NDArray[np.float32]:
    """uint8 […, row_bytes] -> f32 […, d]: exactly the values that the bytes stand for."""
    rows = np.ascontiguousarray(rows)
    leading = rows.shape[:-1]
    d = rows.shape[-1] // dtype.block_bytes * dtype.block_values
    match dtype:
        case Dtype.F32:
            values = rows.view(np.float32).copy()
        case Dtype.F16:
            values = rows.view(np.float16).astype(np.float32)
        case Dtype.BF16:
            values = (rows.view(np.uint16).astype(np.uint32) << 16).view(np.float32)
        case Dtype.Q8_0 | Dtype.Q4_0:
            blocks = rows.reshape(-1, dtype.block_bytes)
            scale = np.ascontiguousarray(blocks[:, :2]).view(np.float16).astype(np.float32)
            values = scale * (_int8(blocks) if dtype is Dtype.Q8_0 else _nibbles(blocks))
    return values.reshape(*leading, d)


def _to_bf16(values: NDArray[np.float32]) -> NDArray[np.uint16]:
    bits = values.view(np.uint32).astype(np.uint64)
    return ((bits + 0x7FFF + ((bits >> 16) & 1)) >> 16).astype(
        np.uint16
    )  # to nearest, ties to even


def _to_q8_0(blocks: NDArray[np.float32]) -> NDArray[np.uint8]:
    scale = np.abs(blocks).max(axis=1, keepdims=True) / np.float32(127)
    inverse = np.divide(np.float32(1), scale, out=np.zeros_like(scale), where=scale > 0)
    return _joined(scale, np.rint(blocks * inverse).astype(np.int8).view(np.uint8))


def _to_q4_0(blocks: NDArray[np.float32]) -> NDArray[np.uint8]:
    largest = np.take_along_axis(blocks, np.abs(blocks).argmax(axis=1)[:, None], axis=1)
    scale = largest / np.float32(-8)
    inverse = np.divide(np.float32(1), scale, out=np.zeros_like(scale), where=scale != 0)
    nibbles = np.minimum(15, (blocks * inverse + np.float32(8.5)).astype(np.int8)).astype(np.uint8)
    half = BLOCK_VALUES // 2
    return _joined(scale, nibbles[:, :half] | nibbles[:, half:] << 4)


def _joined(scale: NDArray[np.float32], packed: NDArray[np.uint8]) -> NDArray[np.uint8]:
    return np.concatenate([scale.astype(np.float16).view(np.uint8), packed], axis=1)


def _int8(blocks: NDArray[np.uint8]) -> NDArray[np.float32]:
    return np.ascontiguousarray(blocks[:, 2:]).view(np.int8).astype(np.float32)


def _nibbles(blocks: NDArray[np.uint8]) -> NDArray[np.float32]:
    packed = blocks[:, 2:]
    return np.concatenate([packed & 15, packed >> 4], axis=1).astype(np.float32) - np.float32(8)
