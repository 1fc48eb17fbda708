"""Our Q4_K and Q6_K blocks as GGML reads them: the answers are those of the same weights in f32."""

from __future__ import annotations

from pathlib import Path

import gguf
import numpy as np
from numpy.typing import NDArray

from ollama_tiering.models import kquant
from ollama_tiering.models.make import make_model, tensor_values, write_model
from ollama_tiering.models.shapes import ModelShape, make_shape
from ollama_tiering.models.tensors import Tensor
from tests.engine.harness import Server, Sidecar, assert_same, text

# GGML rounds the activations to 8 bits before it multiplies. Other weights, such as those of
# another seed, move the log probabilities by more than 1.
MOST_APART = 0.25


def mixed_and_plain() -> tuple[ModelShape, ModelShape]:
    shape = make_shape("qwen3-tiny", dtype="q4_k_m")
    return shape, make_shape("qwen3-tiny", dtype="f32")


def as_read_back(tensor: Tensor) -> NDArray[np.float32]:
    """The values of the f32 model: what gguf reads of the mixed model's blocks."""
    shape, _ = mixed_and_plain()
    (mixed,) = (t for t in shape.tensors() if t.name == tensor.name)
    values = tensor_values(shape, mixed, 0)
    if mixed.dtype not in kquant.BLOCK_BYTES:
        return values
    stored = kquant.quantise(values, mixed.dtype).reshape(*mixed.shape[:-1], -1)
    read: NDArray[np.float32] = gguf.dequantize(
        stored, gguf.GGMLQuantizationType[mixed.dtype.upper()]
    )
    return read.reshape(mixed.shape)


def test_a_q4_k_m_model_answers_as_its_weights_say_and_is_restored(
    binary: Path, sidecar: Sidecar, tmp_path: Path
) -> None:
    mixed, plain = mixed_and_plain()
    make_model(mixed, tmp_path / "mixed.gguf")
    write_model(plain, tmp_path / "plain.gguf", "plain", as_read_back)
    server = Server(binary, tmp_path / "server", tmp_path / "store", socket=sidecar.socket)
    with server:
        for name in ("mixed", "plain"):
            server.create(name, tmp_path / f"{name}.gguf")
        shown = server.post("/api/show", json={"model": "mixed"})
        assert shown["details"]["quantization_level"] == "Q4_K_M"
        prompt = text(300, "q4_k_m")
        expected = dict(server.generate("plain", prompt).logprobs[0].top)
        answer = server.generate("mixed", prompt).logprobs[0]
        found = dict(answer.top)
        common = found.keys() & expected.keys()
        assert len(common) >= len(expected) - 1
        apart = {token: abs(found[token] - expected[token]) for token in common}
        assert max(apart.values()) < MOST_APART, apart
        hit = server.generate("mixed", prompt)
        server.restart()
        restored = server.generate("mixed", prompt)
        assert server.restores()
        assert_same(restored, hit)
