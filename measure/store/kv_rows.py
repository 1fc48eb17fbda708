"""K/V rows to encode: those of the reference engine, with random weights.

V of layer 0 depends only on its token, and with one token per byte tokens repeat. The layers above
it are like those of a real model.
"""

from __future__ import annotations

import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Final

import numpy as np
from numpy.typing import NDArray

from ollama_tiering.engines.reference_engine import ReferenceEngine
from ollama_tiering.models import make
from ollama_tiering.models.shapes import make_shape
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


def made_up_passages() -> list[str]:
    return [
        "".join(chr(32 + (i * i + 7 * i + n) % 95) for i in range(CONTEXT)) for n in range(PASSAGES)
    ]


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


def segments(caches: Sequence[Cache], first_layer: int) -> list[bytes]:
    """K or V of one layer, for one block each, as they lie in a block file."""
    return [
        rows[start : start + BLOCK_TOKENS].tobytes()
        for cache in caches
        for (layer, _kind), rows in cache.items()
        if layer >= first_layer
        for start in range(0, len(rows), BLOCK_TOKENS)
    ]
