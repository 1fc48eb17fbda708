"""A model made to retrieve: the last token occurred once before, the answer is what followed it.

Two layers, as the induction heads of trained models: in the first a head looks at the position
before and copies its token beside the own one; in the second a head looks for the position whose
predecessor is the token at hand and copies the token there. The weights are written down, none is
trained. `reference` computes the same model with attention in f64 over K and V as the cache holds
them (f16).

The residual stream has three parts of PART channels: the own token, its predecessor, the answer.
A head's rotary pairs (i, i + HALF) are those of position for i < FAST; the last STILL do not turn
within any prompt (1e-12 radians a token), and hold a letter in each half.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from ollama_tiering.models import vocab
from ollama_tiering.models.make import write_model
from ollama_tiering.models.shapes import ModelShape
from ollama_tiering.models.tensors import Tensor

Array = NDArray[np.float64]

PART, HEAD, HALF, FAST, STILL = 128, 128, 64, 8, 31
CTX = 17408
LETTERS = "abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ0123456789"
PREVIOUS_SHARPNESS = 100.0  # of the first layer: its scores fall steeply beside the one position
TOKEN_SHARPNESS = 1.0  # of the second: at 16K a fifth of the weight lies on all other positions
LOGIT_SCALE = 2.5
NEAR = 128  # positions before a query that the first layer's reference looks at; checked

SHAPE = ModelShape("retrieval", "qwen3", 2, 3 * PART, 2, 1, HEAD, 32, CTX, "f32", 1e24, 1e-6, "")


def _channel(letter: int) -> int:
    half, pair = divmod(letter, STILL)
    return (1 + half) * HALF - STILL + pair


def _tokens_to_head(part: int) -> NDArray[np.float32]:
    """[HEAD, 3 PART]: one part of the residual stream into the channels of a head that hold it."""
    out = np.zeros((HEAD, 3 * PART), np.float32)
    for letter in range(len(LETTERS)):
        out[_channel(letter), part * PART + letter] = 1
    return out


def _position_of_before() -> NDArray[np.float32]:
    """A query that, turned by its own position, points where a key of 1s of the one before does."""
    turn = SHAPE.rope_base ** (-np.arange(FAST) / HALF)
    out = np.zeros((2, HEAD), np.float32)  # key, query
    out[0, :FAST] = 1
    out[1, :FAST], out[1, HALF : HALF + FAST] = np.cos(turn), -np.sin(turn)
    return out


def values(tensor: Tensor) -> NDArray[np.float32]:
    """One tensor, [outputs, inputs] as in the file. The constant is in the last channel."""
    name = tensor.name.removesuffix(".weight")
    layer, kind = (int(name[4]), name[6:]) if name.startswith("blk.") else (-1, name)
    out = np.zeros(tensor.shape, np.float32)
    if kind == "attn_q_norm":
        return out + (PREVIOUS_SHARPNESS if layer == 0 else TOKEN_SHARPNESS)
    if len(tensor.shape) == 1:
        return out + 1
    if kind == "token_embd":
        for index, letter in enumerate(LETTERS):
            out[ord(letter), index] = 1
        out[:, -1] = 1
    elif kind == "output":
        for index, letter in enumerate(LETTERS):
            out[ord(letter), 2 * PART + index] = LOGIT_SCALE
    elif kind == "attn_v":
        out[:] = _tokens_to_head(0)
    elif kind == "attn_output":  # of the first of two heads
        out[(1 + layer) * PART : (2 + layer) * PART, :HEAD] = _tokens_to_head(0)[:, :PART].T
    elif layer == 0 and kind in ("attn_q", "attn_k"):
        out[:HEAD, -1] = _position_of_before()[int(kind == "attn_q")]
    elif kind in ("attn_q", "attn_k"):
        out[:HEAD] = _tokens_to_head(0 if kind == "attn_q" else 1)
    return out


def write(path: Path) -> None:
    write_model(SHAPE, path, "retrieves what followed the last token", values)


def prompt(tokens: int, needle_at: int, seed: int) -> tuple[str, str]:
    """(text, answer): the last letter occurs once more, at needle_at, before the answer."""
    rng = np.random.default_rng(seed)
    key, answer, *hay = rng.permutation(list(LETTERS))
    letters = rng.choice([answer, *hay], tokens)
    letters[needle_at : needle_at + 2] = key, answer
    letters[-1] = key
    return "".join(letters), str(answer)


def _norm(x: Array) -> Array:
    return x / np.sqrt(np.mean(x * x, -1, keepdims=True) + SHAPE.norm_eps)


def _rope(x: Array) -> Array:
    angle = np.arange(len(x))[:, None] * SHAPE.rope_base ** (-np.arange(HALF) / HALF)
    low, high = x[:, :HALF], x[:, HALF:]
    cos, sin = np.cos(angle), np.sin(angle)
    return np.concatenate([low * cos - high * sin, high * cos + low * sin], -1)


def _attention(q: Array, k: Array, v: Array, first: int, near: int) -> Array:
    """Causal, over the last `near` positions, for queries from `first` on; [queries, HEAD]."""
    out = np.empty((len(q), HEAD))
    for at in range(0, len(q), NEAR):
        rows = q[at : at + NEAR]
        start, seen = max(0, first + at - near), first + at + len(rows)
        scores = rows @ k[start:seen].T / np.sqrt(HEAD)
        later = np.arange(start, seen) > first + at + np.arange(len(rows))[:, None]
        scores[later] = -np.inf
        top = scores.max(-1, keepdims=True)
        far = q[at] @ k[:start].T / np.sqrt(HEAD)
        assert not len(far) or far.max() < top[0, 0] - 60, "more than 1e-26 of the weight is far"
        weights = np.exp(scores - top)
        out[at : at + NEAR] = weights @ v[start:seen] / weights.sum(-1, keepdims=True)
    return out


def reference(text: str) -> dict[str, float]:
    """Letter -> log probability of it as the next token, all in f64 but what the cache rounds.

    The second head has no output and is left out; so are the feed-forward layers, which are 0.
    """
    tensors = {
        t.name.removesuffix(".weight"): values(t).astype(np.float64) for t in SHAPE.tensors()
    }
    x = tensors["token_embd"][[ord(letter) for letter in text]]
    for layer in range(SHAPE.layers):
        weights = {n[6:]: w for n, w in tensors.items() if n.startswith(f"blk.{layer}.")}
        first = 0 if layer == 0 else len(text) - 1  # of the last layer only the last row counts
        h = _norm(x)
        q = _norm(h @ weights["attn_q"][:HEAD].T) * weights["attn_q_norm"]
        k = _norm(h @ weights["attn_k"].T) * weights["attn_k_norm"]
        cached = [
            a.astype(np.float16).astype(np.float64) for a in (_rope(k), h @ weights["attn_v"].T)
        ]
        near = NEAR if layer == 0 else len(text)
        mixed = _attention(_rope(q)[first:], *cached, first, near)
        x = x[first:] + mixed @ weights["attn_output"][:, :HEAD].T
    logits = _norm(x[-1]) @ tensors["output"].T
    logits -= logits.max()
    log_sum = np.log(np.exp(logits).sum())
    return {letter: float(logits[ord(letter)] - log_sum) for letter in LETTERS}


assert max(map(ord, LETTERS)) < vocab.VOCAB_SIZE  # one letter, one token, its byte
