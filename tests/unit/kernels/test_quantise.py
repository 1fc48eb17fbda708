"""Values to stored bytes and back."""

from __future__ import annotations

import numpy as np
import pytest

from ollama_tiering.kernels import Dtype, PaError, dequantise, quantise

BOUNDS = {
    Dtype.F32: 0.0,
    Dtype.F16: 2**-11,
    Dtype.BF16: 2**-8,
    Dtype.Q8_0: 0.5 / 127 + 2**-11,
    Dtype.Q4_0: 1 / 8 + 2**-11,  # ggml's 16 levels reach -8 but not +8
}


@pytest.mark.parametrize("dtype", Dtype)
def test_what_comes_back_is_within_the_types_step(dtype: Dtype) -> None:
    values = np.random.default_rng(1).normal(size=(7, 3, 128)).astype(np.float32)
    rows = quantise(values, dtype)
    assert rows.shape == (7, 3, dtype.row_bytes(128))
    assert np.abs(dequantise(rows, dtype) - values).max() <= BOUNDS[dtype] * np.abs(values).max()


@pytest.mark.parametrize("dtype", Dtype)
def test_stored_values_are_stored_again_as_the_same_bytes(dtype: Dtype) -> None:
    values = np.random.default_rng(2).normal(size=(5, 64)).astype(np.float32)
    values[:, ::32] = -4.0  # each block's largest, so that the scale comes back exactly
    rows = quantise(values, dtype)
    stored = dequantise(rows, dtype)
    assert np.array_equal(dequantise(quantise(stored, dtype), dtype), stored)


def test_a_q8_0_block_is_a_scale_and_int8() -> None:
    values = np.zeros(32, np.float32)
    values[0], values[31] = 127.0, -127.0
    rows = quantise(values, Dtype.Q8_0)
    assert bytes(rows[:2]) == np.float16(1).tobytes()
    assert rows[2] == 127
    assert rows[33] == 256 - 127


def test_a_q4_0_block_holds_value_i_low_and_value_i_plus_16_high() -> None:
    values = np.zeros(32, np.float32)
    values[0], values[1], values[17] = -8.0, 3.0, 5.0
    rows = quantise(values, Dtype.Q4_0)
    assert bytes(rows[:2]) == np.float16(1).tobytes()
    assert rows[2] == 0 | 8 << 4
    assert rows[3] == 11 | 13 << 4
    assert np.array_equal(dequantise(rows, Dtype.Q4_0), values)


def test_a_block_of_zeros_is_zeros() -> None:
    for dtype in Dtype:
        stored = dequantise(quantise(np.zeros((2, 32), np.float32), dtype), dtype)
        assert not stored.any()


def test_bf16_rounds_to_the_nearest_even() -> None:
    values = np.array([1.0, 1.0 + 2**-8, 1.0 + 3 * 2**-8, -1.0 - 2**-9], np.float32)
    stored = dequantise(quantise(values, Dtype.BF16), Dtype.BF16)
    assert stored.tolist() == [1.0, 1.0, 1.0 + 2**-6, -1.0]


def test_rows_that_are_not_whole_blocks_are_refused() -> None:
    with pytest.raises(PaError, match="multiples of 32 values, not 48"):
        quantise(np.zeros((2, 48), np.float32), Dtype.Q8_0)
