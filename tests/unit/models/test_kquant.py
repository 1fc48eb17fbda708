"""Blocks of Q4_K and Q6_K: gguf's own reading of them gives the weights back, within a step."""

from __future__ import annotations

import gguf
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays
from numpy.typing import NDArray

from ollama_tiering.models import kquant
from ollama_tiering.models.shapes import ShapeError, make_shape
from ollama_tiering.models.tensors import use_more_bits

Floats = NDArray[np.float32]

# Blocks whose sub-blocks lie decades apart, around different middles; and any mixture of them.
blocks = st.builds(
    lambda noise, scale, middle: (noise * scale[:, None] + middle[:, None]).reshape(1, 256),
    arrays(np.float32, (16, 16), elements=st.floats(-1, 1, width=32)),
    arrays(np.float32, 16, elements=st.sampled_from([0, 0.0625, 1, 64])),
    arrays(np.float32, 16, elements=st.sampled_from([-8, 0, 0, 0.5, 8])),
)


def read_back(values: Floats, kind: str) -> Floats:
    stored = kquant.quantise(values, kind).reshape(len(values), -1)
    read: Floats = gguf.dequantize(stored, gguf.GGMLQuantizationType[kind.upper()])
    return read


F16_QUANTUM = 2.0**-24  # between the smallest f16: d has no relative precision there


def noise(rows: int, columns: int) -> Floats:
    values = np.random.default_rng(1).uniform(-0.1, 0.1, (rows, columns))
    return values.astype(np.float32)


@settings(max_examples=200)
@given(blocks)
def test_q4_k_is_within_half_a_step_and_what_its_scales_lose(values: Floats) -> None:
    x = values.reshape(8, 32)
    least = np.maximum(-x.min(-1), 0)
    step = (x.max(-1) + least) / 15
    d, dmin = step.max() / 63, least.max() / 63
    # a scale is off by d / 2 at most, 15 times that at the far end; an offset by dmin / 2
    bound = step / 2 + 8 * d + dmin / 2 + 2e-3 * abs(x).max() + F16_QUANTUM / 2 * 63 * (15 + 1)
    error = abs(read_back(values, "q4_k").reshape(8, 32) - x)
    assert (error <= bound[:, None]).all()


@settings(max_examples=200)
@given(blocks)
def test_q6_k_is_within_a_step_and_what_its_scales_lose(values: Floats) -> None:
    x = values.reshape(16, 16)
    step = abs(x).max(-1) / 32
    d = step.max() / 128
    # a whole step: the end opposite to the largest weight has one value less
    bound = step + 16.5 * d + 2e-3 * abs(x).max() + F16_QUANTUM / 2 * 128 * 32
    error = abs(read_back(values, "q6_k").reshape(16, 16) - x)
    assert (error <= bound[:, None]).all()


@pytest.mark.parametrize(("kind", "most"), [("q4_k", 0.07), ("q6_k", 0.02)])
def test_the_error_of_noise_is_that_of_its_bits(kind: str, most: float) -> None:
    values = noise(64, 1024)
    error = read_back(values, kind) - values
    assert np.sqrt((error**2).mean() / (values**2).mean()) < most


@pytest.mark.parametrize("kind", ["q4_k", "q6_k"])
def test_zeros_stay_zeros_and_every_chunk_is_written(
    kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert not read_back(np.zeros((2, 256), np.float32), kind).any()
    values = noise(5, 512)
    whole = kquant.quantise(values, kind)
    monkeypatch.setattr(kquant, "_CHUNK_BLOCKS", 3)
    assert (kquant.quantise(values, kind) == whole).all()
    assert whole.shape == (10, kquant.BLOCK_BYTES[kind])


def test_a_row_that_is_no_whole_block_is_refused() -> None:
    with pytest.raises(ValueError, match="rows of 128"):
        kquant.quantise(noise(2, 128), "q4_k")


def test_q4_k_m_is_the_mixture_of_llama_cpp() -> None:
    """Layers 0 to 2 and 24 to 27 of 28, and every third in between (llama-quant.cpp)."""
    more = {0, 1, 2, 5, 8, 11, 14, 17, 20, 23, 24, 25, 26, 27}
    assert {layer for layer in range(28) if use_more_bits(layer, 28)} == more
    tensors = {t.name: t.dtype for t in make_shape("qwen3-0.6b-q4km").tensors()}
    six = {name for name, dtype in tensors.items() if dtype == "q6_k"}
    parts = ("attn_v", "ffn_down")
    assert six == {f"blk.{n}.{part}.weight" for n in more for part in parts} | {"output.weight"}
    matrices = {dtype for name, dtype in tensors.items() if "norm" not in name}
    assert matrices == {"q4_k", "q6_k"}
    assert tensors["blk.0.attn_norm.weight"] == "f32"


@pytest.mark.parametrize(
    ("overrides", "option"), [({"embd": 384}, "--embd"), ({"ffn": 800}, "--ffn"),
                              ({"head_dim": 96}, "--head-dim")],
)  # fmt: skip
def test_a_shape_whose_rows_are_no_whole_blocks_is_refused(
    overrides: dict[str, int], option: str
) -> None:
    with pytest.raises(ShapeError, match=option):
        make_shape("qwen3-tiny", dtype="q4_k_m", **overrides)
