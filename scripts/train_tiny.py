#!/usr/bin/env python3
"""Trains a small qwen3 on text that comes with Python, for K/V that training gave its shape.

Needs JAX, which the project does not: `python3 -m venv V && V/bin/pip install jax`, then
`V/bin/python scripts/train_tiny.py --minutes 8 OUT.npz`. Writes the weights under their GGUF names,
the geometry beside them, and the losses; `scripts/bench_encoding.py --trained OUT.npz` reads that.
One token per byte. The text is the language reference in `pydoc_data` and the standard library's
sources; every tenth topic is held out and used for nothing but the last loss and the K/V.
"""

from __future__ import annotations

import argparse
import sysconfig
import time
from pathlib import Path
from pydoc_data import topics
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

GEOMETRY = {
    "layers": 4, "embd": 256, "heads": 4, "kv_heads": 4, "head_dim": 128, "ffn": 512
}  # fmt: skip
VOCAB, CONTEXT, BATCH = 259, 256, 8
EPS, ROPE_BASE = 1e-6, 1e6
PEAK_RATE, WARMUP_STEPS, DECAY = 2e-3, 40, 0.05
Weights = dict[str, Any]


def texts() -> tuple[bytes, bytes]:
    """(to train on, held out)."""
    pages = [topics.topics[name].encode() for name in sorted(topics.topics)]
    held = b"\n".join(pages[::10])
    train = [page for index, page in enumerate(pages) if index % 10]
    library = Path(sysconfig.get_paths()["stdlib"])
    train += [path.read_bytes() for path in sorted(library.glob("*.py"))]
    return b"\n".join(train), held


def initial(seed: int) -> Weights:
    g = GEOMETRY
    rng = np.random.default_rng(seed)
    q, kv = g["heads"] * g["head_dim"], g["kv_heads"] * g["head_dim"]
    shapes: dict[str, tuple[int, ...]] = {"token_embd": (VOCAB, g["embd"])}
    for layer in range(g["layers"]):
        shapes |= {
            f"blk.{layer}.{name}": shape
            for name, shape in {
                "attn_norm": (g["embd"],),
                "attn_q": (q, g["embd"]),
                "attn_k": (kv, g["embd"]),
                "attn_v": (kv, g["embd"]),
                "attn_output": (g["embd"], q),
                "ffn_norm": (g["embd"],),
                "ffn_gate": (g["ffn"], g["embd"]),
                "ffn_up": (g["ffn"], g["embd"]),
                "ffn_down": (g["embd"], g["ffn"]),
                "attn_q_norm": (g["head_dim"],),
                "attn_k_norm": (g["head_dim"],),
            }.items()
        }
    shapes |= {"output_norm": (g["embd"],), "output": (VOCAB, g["embd"])}
    return {
        name: np.ones(shape, np.float32)
        if len(shape) == 1
        else (rng.standard_normal(shape) * 0.6 / shape[-1] ** 0.5).astype(np.float32)
        for name, shape in shapes.items()
    }


def norm(x: Any, weight: Any) -> Any:
    return x * jax.lax.rsqrt(jnp.mean(x * x, -1, keepdims=True) + EPS) * weight


def rope(x: Any) -> Any:
    half = x.shape[-1] // 2
    angle = jnp.arange(x.shape[1])[:, None, None] * ROPE_BASE ** (-jnp.arange(half) / half)
    low, high = x[..., :half], x[..., half:]
    cos, sin = jnp.cos(angle), jnp.sin(angle)
    return jnp.concatenate([low * cos - high * sin, high * cos + low * sin], -1)


def loss(w: Weights, tokens: Any) -> Any:
    """Mean nats per byte of [batch, CONTEXT + 1] tokens."""
    g = GEOMETRY
    x = w["token_embd"][tokens[:, :-1]]
    batch, length, _ = x.shape
    mask = jnp.tril(jnp.ones((length, length), bool))
    for layer in range(g["layers"]):
        b = f"blk.{layer}."
        h = norm(x, w[b + "attn_norm"])
        q, k, v = (
            (h @ w[b + name].T).reshape(batch, length, -1, g["head_dim"])
            for name in ("attn_q", "attn_k", "attn_v")
        )
        q, k = rope(norm(q, w[b + "attn_q_norm"])), rope(norm(k, w[b + "attn_k_norm"]))
        scores = jnp.einsum("bqhd,bkhd->bhqk", q, k) * g["head_dim"] ** -0.5
        weights = jax.nn.softmax(jnp.where(mask, scores, -jnp.inf), -1)
        mixed = jnp.einsum("bhqk,bkhd->bqhd", weights, v).reshape(batch, length, -1)
        x = x + mixed @ w[b + "attn_output"].T
        h = norm(x, w[b + "ffn_norm"])
        x = (
            x
            + (jax.nn.silu(h @ w[b + "ffn_gate"].T) * (h @ w[b + "ffn_up"].T)) @ w[b + "ffn_down"].T
        )
    logits = norm(x, w["output_norm"]) @ w["output"].T
    picked = jnp.take_along_axis(jax.nn.log_softmax(logits), tokens[:, 1:, None], -1)
    return -picked.mean()


def adamw(w: Weights, m: Weights, v: Weights, tokens: Any, step: Any, rate: Any) -> Any:
    value, gradient = jax.value_and_grad(loss)(w, tokens)
    m = jax.tree.map(lambda a, g: 0.9 * a + 0.1 * g, m, gradient)
    v = jax.tree.map(lambda a, g: 0.95 * a + 0.05 * g * g, v, gradient)

    def move(p: Any, a: Any, b: Any) -> Any:
        update = (a / (1 - 0.9**step)) / (jnp.sqrt(b / (1 - 0.95**step)) + 1e-8)
        return p - rate * (update + (DECAY * p if p.ndim > 1 else 0))

    return jax.tree.map(move, w, m, v), m, v, value


def batches(data: bytes, rng: np.random.Generator) -> Any:
    array = np.frombuffer(data, np.uint8)
    while True:
        starts = rng.integers(0, array.size - CONTEXT - 1, BATCH)
        yield np.stack([array[s : s + CONTEXT + 1] for s in starts]).astype(np.int32)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("out", type=Path)
    parser.add_argument("--minutes", type=float, default=8.0)
    parser.add_argument("--seed", type=int, default=0)
    given = parser.parse_args()
    train, held = texts()
    w: Weights = {name: jnp.asarray(value) for name, value in initial(given.seed).items()}
    m = jax.tree.map(jnp.zeros_like, w)
    v = jax.tree.map(jnp.zeros_like, w)
    move = jax.jit(adamw)
    feed = batches(train, np.random.default_rng(given.seed))
    limit = given.minutes * 60
    start, step, recent = time.monotonic(), 0, 0.0
    while (spent := time.monotonic() - start) < limit:
        step += 1
        # up, then down to nothing at the end of the time
        rate = PEAK_RATE * min(1.0, step / WARMUP_STEPS) * max(0.02, 1 - spent / limit)
        w, m, v, value = move(w, m, v, next(feed), step, rate)
        recent += 0.05 * (float(value) - recent) if recent else float(value)
        if step % 20 == 0:
            print(f"step {step} {spent:.0f} s loss {recent:.3f} nats per byte", flush=True)
    check = batches(held, np.random.default_rng(1))
    measured = jax.jit(loss)
    held_loss = float(np.mean([measured(w, next(check)) for _ in range(8)]))
    print(f"held out: {held_loss:.3f} nats per byte after {step} steps")
    saved: dict[str, Any] = {f"w/{name}": np.asarray(value) for name, value in w.items()}
    saved |= {f"g/{name}": np.int64(value) for name, value in GEOMETRY.items()}
    np.savez(
        given.out,
        **saved,
        held=np.frombuffer(held, np.uint8),
        steps=np.int64(step),
        tokens=np.int64(step * BATCH * CONTEXT),
        loss=np.float64(recent),
        held_loss=np.float64(held_loss),
    )


if __name__ == "__main__":
    main()
