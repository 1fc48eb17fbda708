"""What a token's K/V takes in models that many people run, and the attention that serves them.

Geometry as the makers' configurations say it. Which kernels are compiled ahead (images.py) and the
tables of docs/attention/long-context.md are made from this list; the models that models/shapes.py
can make are the same there, which a test compares.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Final

from ollama_tiering.kernels.shape import Dtype

# Architectures of the list for which Ollama chooses its Go engine, and not llama.cpp's
# (OllamaEngineRequired, v0.16.3 fs/ggml/ggml.go:256).
GO_ENGINE: Final = frozenset({"gemma3", "gptoss", "mistral3", "qwen3", "qwen3moe"})


@dataclass(frozen=True, slots=True)
class KnownModel:
    """`full_layers`: layers that see everything; the others, if any, see a window of `window`
    positions, and their K/V stop growing there. `arch`: GGUF's general.architecture.
    """

    name: str
    arch: str
    layers: int
    heads: int
    kv_heads: int
    head_dim: int
    full_layers: int
    window: int = 0

    @property
    def decode_rows(self) -> int:
        """Query heads of one decode block: those of a K/V head, at most 8, spread evenly."""
        group = self.heads // self.kv_heads
        return math.ceil(group / math.ceil(group / 8))

    def bytes_per_token(self, kind: Dtype) -> int:
        """K and V of the layers that see everything."""
        return self.full_layers * self._layer_bytes(kind)

    def kv_bytes(self, tokens: int, kind: Dtype) -> int:
        """K and V of `tokens` tokens in one sequence, windows included."""
        windows = (self.layers - self.full_layers) * min(tokens, self.window)
        return tokens * self.bytes_per_token(kind) + windows * self._layer_bytes(kind)

    def _layer_bytes(self, kind: Dtype) -> int:
        return 2 * self.kv_heads * kind.row_bytes(self.head_dim)


MODELS: Final = (
    KnownModel("qwen3:0.6b", "qwen3", 28, 16, 8, 128, 28),
    KnownModel("qwen3:4b", "qwen3", 36, 32, 8, 128, 36),
    KnownModel("qwen3:8b", "qwen3", 36, 32, 8, 128, 36),
    KnownModel("qwen3:14b", "qwen3", 40, 40, 8, 128, 40),
    KnownModel("qwen3:32b", "qwen3", 64, 64, 8, 128, 64),
    KnownModel("qwen3:30b (a3b)", "qwen3moe", 48, 32, 4, 128, 48),
    KnownModel("gemma3:4b", "gemma3", 34, 8, 4, 256, 5, 1024),
    KnownModel("gemma3:12b", "gemma3", 48, 16, 8, 256, 8, 1024),
    KnownModel("gemma3:27b", "gemma3", 62, 32, 16, 128, 10, 1024),
    KnownModel("gpt-oss:20b", "gptoss", 24, 64, 8, 64, 12, 128),
    KnownModel("gpt-oss:120b", "gptoss", 36, 64, 8, 64, 18, 128),
    KnownModel("mistral-small:24b", "mistral3", 40, 32, 8, 128, 40),
    KnownModel("llama3.2:1b", "llama", 16, 32, 8, 64, 16),
    KnownModel("llama3.2:3b", "llama", 28, 24, 8, 128, 28),
    KnownModel("llama3.1:8b", "llama", 32, 32, 8, 128, 32),
    KnownModel("llama3.3:70b", "llama", 80, 64, 8, 128, 80),
)
