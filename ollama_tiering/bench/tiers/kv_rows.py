"""K/V rows to encode: the reference engine's, of a model with random weights or of a trained one.

V of layer 0 depends on nothing but its token, and with one token per byte tokens repeat: what
stands for a real model are the layers above it.
"""

from __future__ import annotations

import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from ollama_tiering.engines.reference_engine import ReferenceEngine
from ollama_tiering.models import make
from ollama_tiering.models.shapes import Shape, make_shape
from ollama_tiering.store import DEFAULT_BLOCK_TOKENS as BLOCK_TOKENS

CONTEXT: Final = 256  # tokens of one passage
PASSAGES: Final = 16

Rows = NDArray[np.float16]
Cache = dict[tuple[int, str], Rows]  # (layer, "k" or "v") -> rows


def of_random_weights(passages: Sequence[str]) -> list[Cache]:
    with tempfile.TemporaryDirectory() as name:
        file = Path(name) / "random.gguf"
        shape = make_shape("qwen3-tiny", layers=4, heads=4, kv_heads=4, head_dim=128, ffn=512)
        make.make_model(shape, file)
        return kv_of(file, passages)


def of_trained(archive: Path) -> tuple[list[Cache], str]:
    """(K/V of text it was not trained on, what it is) of a file of scripts/train_tiny.py."""
    with np.load(archive) as found, tempfile.TemporaryDirectory() as name:
        file = Path(name) / "trained.gguf"
        shape = trained_gguf(found, file)
        facts = (
            f"Trained: {shape.layers} layers, {shape.kv_heads} K/V heads of {shape.head_dim}, byte "
            f"tokens, {int(found['tokens']):,} tokens in {int(found['steps'])} steps; loss "
            f"{float(found['loss']):.2f}, held-out text {float(found['held_loss']):.2f} nats per "
            f"byte. K/V is of {PASSAGES} held-out passages of {CONTEXT} tokens."
        )
        return kv_of(file, passages_of(found["held"].tobytes())), facts


def made_up_passages() -> list[str]:
    return [
        "".join(chr(32 + (i * i + 7 * i + n) % 95) for i in range(CONTEXT)) for n in range(PASSAGES)
    ]


def trained_gguf(archive: Any, path: Path) -> Shape:
    """The weights of scripts/train_tiny.py as a GGUF in f32."""
    geometry = {key[2:]: int(archive[key]) for key in archive.files if key.startswith("g/")}
    shape = make_shape("qwen3-tiny", dtype="f32", **geometry)
    make.write_model(
        shape, path, "trained", lambda t: archive["w/" + t.name.removesuffix(".weight")]
    )
    return shape


def kv_of(model: Path, passages: Sequence[str]) -> list[Cache]:
    """The reference engine's cache after each passage."""
    out = []
    for passage in passages:
        engine = ReferenceEngine(model, ctx=CONTEXT + 8)
        engine.generate(passage, 1)
        layers = range(engine.weights.layers)
        out.append(
            {
                (layer, kind): engine._cache[kind][layer, :CONTEXT].copy()
                for layer in layers
                for kind in "kv"
            }
        )
    return out


def passages_of(text: bytes) -> list[str]:
    """Passages of CONTEXT characters, spread over the text."""
    ascii_text = "".join(c for c in text.decode(errors="ignore") if c.isascii())
    step = len(ascii_text) // PASSAGES
    return [ascii_text[at * step :][:CONTEXT] for at in range(PASSAGES)]


def segments(caches: Sequence[Cache], kinds: str = "kv", first_layer: int = 0) -> list[bytes]:
    """One layer's K or V of one block each, as they lie in a block file."""
    return [
        rows[start : start + BLOCK_TOKENS].tobytes()
        for cache in caches
        for (layer, kind), rows in cache.items()
        if kind in kinds and layer >= first_layer
        for start in range(0, len(rows), BLOCK_TOKENS)
    ]
