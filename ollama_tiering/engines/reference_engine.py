"""A small numpy engine that keeps its KV cache in a block store: an example, not a product.

It reads the GGUF files of `tiering model make` (qwen3 family, one token per byte), computes in
f32, caches K and V rows as f16 and samples greedily. What it shows is the order of things any
engine follows: match, compare with what memory already has, get, copy rows in, resume at the
first row nobody has, and put the whole blocks and the tail afterwards. It is not thread-safe.

Restored rows land in the same arrays an in-memory hit reads, so both run the same code on the
same bytes: resumed at the same position, their logits are equal bit for bit.
"""

import hashlib
import logging
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

import gguf
import numpy as np
from numpy.typing import NDArray

import ollama_tiering
from ollama_tiering.errors import TieringError, UsageError
from ollama_tiering.models import vocab
from ollama_tiering.store import DEFAULT_BLOCK_TOKENS as BLOCK_TOKENS
from ollama_tiering.store import LayerSpec, Namespace

PREFILL_BATCH = 256
TOP_LOGPROBS = 5

log = logging.getLogger(__name__)

Floats = NDArray[np.float32]
Rows = NDArray[np.float16]
SegmentsOf = Callable[[int], Mapping[tuple[int, str], Rows]]


class Store(Protocol):
    """What the engine asks of a block store; `ollama_tiering.client.BlockClient` is one."""

    def match(self, ns: Namespace, tokens: Sequence[int]) -> Any: ...

    def get(self, ns: Namespace, match: Any) -> Sequence[Any]: ...

    def put(self, ns: Namespace, tokens: Sequence[int], segments_of: SegmentsOf) -> Any: ...


@dataclass
class Result:
    """One answer and where its rows came from; logprobs hold the best few of each step."""

    tokens: list[int] = field(default_factory=list)
    logprobs: list[list[tuple[int, float]]] = field(default_factory=list)
    tokens_recomputed: int = 0
    tokens_in_memory: int = 0
    tokens_restored: int = 0
    seconds_to_first_token: float = 0.0

    @property
    def text(self) -> str:
        return vocab.decode(self.tokens)


class _Weights:
    """The tensors of a qwen3 GGUF, dequantised to f32, and the geometry its metadata states."""

    def __init__(self, path: Path) -> None:
        reader = gguf.GGUFReader(path)
        self._values = {name: f.contents() for name, f in reader.fields.items()}
        arch = self._values["general.architecture"]
        if arch != "qwen3" or tuple(self._values["tokenizer.ggml.tokens"]) != vocab.TOKENS:
            raise UsageError(
                f"{path}: a {arch} model that the reference engine cannot run",
                hint="make one with `tiering model make qwen3-tiny FILE.gguf`",
            )
        self.layers: int = self._get("block_count")
        self.heads: int = self._get("attention.head_count")
        self.kv_heads: int = self._get("attention.head_count_kv")
        self.head_dim: int = self._get("attention.key_length")
        self.eps: float = self._get("attention.layer_norm_rms_epsilon")
        self.rope_base: float = self._get("rope.freq_base")
        self._tensors: dict[str, Floats] = {
            t.name: np.ascontiguousarray(gguf.dequantize(t.data, t.tensor_type), np.float32)
            for t in reader.tensors
        }

    def _get(self, key: str) -> Any:
        return self._values[f"qwen3.{key}"]

    def __getitem__(self, name: str) -> Floats:
        return self._tensors[name + ".weight"]


class ReferenceEngine:
    """One model and one sequence in memory; `store` is where its rows outlive it."""

    def __init__(self, gguf_path: Path, store: Store | None = None, *, ctx: int = 4096) -> None:
        self.weights = _Weights(gguf_path)
        self.namespace = _namespace(gguf_path, self.weights)
        self.ctx = ctx
        self._store = store
        self._tokens: list[int] = []  # the token of every row that is valid in the cache
        shape = (self.weights.layers, ctx, self.weights.kv_heads * self.weights.head_dim)
        self._cache: dict[str, Rows] = {kind: np.zeros(shape, np.float16) for kind in "kv"}

    def generate(self, prompt: str, n: int, *, resume: bool = True) -> Result:
        """Answers greedily with n tokens; without `resume` every row is computed anew."""
        started = time.perf_counter()
        ids, result = vocab.encode(prompt), Result()
        if not ids or n < 1 or len(ids) + n > self.ctx:
            raise UsageError(f"prompt ({len(ids)}) and answer ({n}) must fit into {self.ctx}")
        # The last token is always computed: it is what yields the first logits.
        usable = ids[:-1]
        self._tokens = usable[: _common(self._tokens, usable)] if resume else []
        result.tokens_in_memory = len(self._tokens)
        if resume and self._store:
            with _failure_is_a_miss("restore"):
                self._restore(self._store, usable)
        result.tokens_restored = len(self._tokens) - result.tokens_in_memory
        result.tokens_recomputed = len(ids) - len(self._tokens)
        while len(self._tokens) < len(ids):
            logits = self._forward(ids[len(self._tokens) :][:PREFILL_BATCH])
        result.seconds_to_first_token = time.perf_counter() - started
        while True:
            best = _top_logprobs(logits)
            result.tokens.append(best[0][0])
            result.logprobs.append(best)
            if len(result.tokens) == n:
                break
            logits = self._forward(result.tokens[-1:])
        if self._store:
            with _failure_is_a_miss("save"):
                self._store.put(self.namespace, self._tokens, self._segments_of)
        return result

    def forget(self) -> None:
        """Empties the memory, as an unload does; the store keeps what it has."""
        self._tokens = []

    def _restore(self, store: Store, usable: list[int]) -> None:
        """Copies stored rows behind the ones in memory, block by block."""
        had = len(self._tokens)
        match = store.match(self.namespace, usable)
        if match.rows <= had:
            return
        first = 0
        for block in store.get(self.namespace, match):
            last = min(first + block.rows, len(usable))
            start = max(first, had)
            if start < last:
                for (kind, layer), cells in self._cells(start, last):
                    rows = np.frombuffer(block.segment(layer, kind), np.float16)
                    cells[:] = rows.reshape(-1, cells.shape[1])[start - first : last - first]
                self._tokens = usable[:last]
            first = last

    def _segments_of(self, block_index: int) -> dict[tuple[int, str], Rows]:
        start = block_index * BLOCK_TOKENS
        last = min(start + BLOCK_TOKENS, len(self._tokens))
        return {(layer, kind): rows for (kind, layer), rows in self._cells(start, last)}

    def _cells(self, start: int, last: int) -> list[tuple[tuple[str, int], Rows]]:
        layers = range(self.weights.layers)
        return [((k, i), self._cache[k][i, start:last]) for k in "kv" for i in layers]

    def _forward(self, ids: Sequence[int]) -> Floats:
        """Appends the rows of `ids` to the cache; returns the logits after the last of them."""
        w = self.weights
        start, end = len(self._tokens), len(self._tokens) + len(ids)
        x = w["token_embd"][list(ids)]
        for layer in range(w.layers):
            blk = f"blk.{layer}."
            h = _rms_norm(x, w[blk + "attn_norm"], w.eps)
            x += self._attention(h, layer, start, end) @ w[blk + "attn_output"].T
            h = _rms_norm(x, w[blk + "ffn_norm"], w.eps)
            gate = h @ w[blk + "ffn_gate"].T
            gate *= (h @ w[blk + "ffn_up"].T) / (1 + np.exp(-gate))
            x += gate @ w[blk + "ffn_down"].T
        self._tokens = [*self._tokens, *ids]
        out: Floats = _rms_norm(x[-1], w["output_norm"], w.eps) @ w["output"].T
        return out

    def _attention(self, h: Floats, layer: int, start: int, end: int) -> Floats:
        w, blk, n = self.weights, f"blk.{layer}.", end - start
        q = (h @ w[blk + "attn_q"].T).reshape(n, w.heads, w.head_dim)
        k = (h @ w[blk + "attn_k"].T).reshape(n, w.kv_heads, w.head_dim)
        q = _rope(_rms_norm(q, w[blk + "attn_q_norm"], w.eps), start, w.rope_base)
        k = _rope(_rms_norm(k, w[blk + "attn_k_norm"], w.eps), start, w.rope_base)
        self._cache["k"][layer, start:end] = k.reshape(n, -1)
        self._cache["v"][layer, start:end] = h @ w[blk + "attn_v"].T
        # [kv_heads, rows, head_dim]: a row is computed from what the cache holds, not from f32.
        keys, values = (
            self._cache[kind][layer, :end]
            .astype(np.float32)
            .reshape(end, w.kv_heads, w.head_dim)
            .transpose(1, 0, 2)
            for kind in "kv"
        )
        group = w.heads // w.kv_heads
        heads = q.reshape(n, w.kv_heads, group, w.head_dim).transpose(1, 2, 0, 3)
        scores = heads @ keys[:, None].swapaxes(-1, -2) * np.float32(w.head_dim**-0.5)
        hidden = np.arange(end) > np.arange(start, end)[:, None]
        scores = np.where(hidden, np.float32(-np.inf), scores)
        scores = np.exp(scores - scores.max(-1, keepdims=True))
        mixed = scores @ values[:, None] / scores.sum(-1, keepdims=True)
        out: Floats = mixed.transpose(2, 0, 1, 3).reshape(n, -1)
        return out


@contextmanager
def _failure_is_a_miss(what: str) -> Iterator[None]:
    try:
        yield
    except (OSError, TieringError) as error:
        log.warning("%s: %s", what, error)


def _namespace(path: Path, w: _Weights) -> Namespace:
    with path.open("rb") as file:
        digest = hashlib.file_digest(file, "sha256").hexdigest()
    return Namespace.of(
        model=f"sha256-{digest}",
        engine=f"reference/{ollama_tiering.__version__}",
        cache_dtype="f16",
        layers=[LayerSpec(0, i, w.kv_heads, w.head_dim, w.head_dim) for i in range(w.layers)],
        block_tokens=BLOCK_TOKENS,
    )


def _common(a: Sequence[int], b: Sequence[int]) -> int:
    """Length of the common prefix."""
    same = [*(x == y for x, y in zip(a, b, strict=False)), False]
    return same.index(False)


def _rms_norm(x: Floats, weight: Floats, eps: float) -> Floats:
    rms: Floats = np.sqrt(np.mean(x * x, -1, keepdims=True) + np.float32(eps))
    return x / rms * weight


def _rope(x: Floats, start: int, base: float) -> Floats:
    """Rotates pairs half a head apart (neox order); x is [positions, heads, head_dim]."""
    half = x.shape[-1] // 2
    position = np.arange(start, start + len(x))[:, None, None]
    angle = position * base ** (-np.arange(half) / half)
    cos, sin = np.cos(angle).astype(np.float32), np.sin(angle).astype(np.float32)
    low, high = x[..., :half], x[..., half:]
    return np.concatenate([low * cos - high * sin, high * cos + low * sin], -1)


def _top_logprobs(logits: Floats) -> list[tuple[int, float]]:
    shifted = logits.astype(np.float64) - logits.max()
    logprobs = shifted - np.log(np.exp(shifted).sum())
    best = np.argsort(-logprobs, kind="stable")[:TOP_LOGPROBS]
    return [(int(token), float(logprobs[token])) for token in best]
