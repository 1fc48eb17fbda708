"""Namespaces and chains of keys: what keys.json says."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from typing import Any

from ollama_tiering.store.block.key import (
    BlockExtra,
    LayerSpec,
    Namespace,
    prefix_chain,
    tokens_to_bytes,
)
from tests.tokens import tail_key

INT32_MAX, INT32_MIN = (1 << 31) - 1, -(1 << 31)


def namespaces() -> dict[str, Namespace]:
    def full(layers: int, heads: int, dim: int) -> list[LayerSpec]:
        return [LayerSpec(0, layer, heads, dim, dim) for layer in range(layers)]

    return {
        "qwen3": Namespace.of(
            model="sha256-" + "a" * 64,
            engine="ollama-go/0.16.3",
            cache_dtype="f16",
            layers=full(2, 8, 128),
            flash_attention=True,
        ),
        **{
            name: Namespace.of(
                model="sha256-" + "a" * 64,
                engine="ollama-go/0.16.3+0123456789abcdef",
                cache_dtype="f16",
                layers=full(2, 8, 128),
                flash_attention=True,
                extra="devices=none;cpu=AVX2,FMA;libc=2.36 fma;rows=hh" + attention,
            )
            for name, attention in (
                ("stock attention", ""),
                ("exact attention", ";attention=exact.2.avx2"),
            )
        },
        "gemma3": Namespace.of(
            model="sha256-" + "b" * 64,
            engine="ollama-go/0.16.3",
            cache_dtype="q8_0",
            layers=[
                LayerSpec(0, 0, 4, 256, 256, "swa", 1024),
                LayerSpec(1, 1, 4, 256, 192),
                LayerSpec(0, 2, 4, 256, 256, "chunked", 8192),
            ],
            adapters=["sha256-" + "c" * 64, "sha256-" + "d" * 64],
            extra="rope=yarn:äöü",
        ),
        "small-blocks": Namespace.of(
            model="m", engine="test/1", cache_dtype="f32", layers=full(1, 1, 4), block_tokens=4
        ),
        "empty": Namespace(model="", engine="", cache_dtype="", layers=""),
    }


def chains() -> Iterator[dict[str, Any]]:
    image = hashlib.sha256(b"image").digest()
    other = hashlib.sha256(b"another image").digest()
    cases: list[tuple[str, str, list[int], list[BlockExtra]]] = [
        ("no tokens", "qwen3", [], []),
        ("one tail row", "qwen3", [7], []),
        ("63 tail rows", "qwen3", list(range(100, 163)), []),
        ("one whole block", "qwen3", list(range(64)), []),
        ("two whole blocks and a tail of 1", "qwen3", list(range(129)), []),
        (
            "three whole blocks and a tail of 63",
            "gemma3",
            [(i * 7919) % 151_936 for i in range(255)],
            [],
        ),
        ("negative and large ids", "small-blocks", [-1, INT32_MIN, INT32_MAX, 0, 262_143, -2], []),
        ("an image in the second block", "qwen3", [1] * 130, [BlockExtra(70, image)]),
        (
            "images at the first and last row of a block and in the tail",
            "small-blocks",
            list(range(11)),
            [
                BlockExtra(0, image),
                BlockExtra(3, other),
                BlockExtra(7, image),
                BlockExtra(10, other),
            ],
        ),
        (
            "two digests at one row",
            "small-blocks",
            [1, 2, 3],
            [BlockExtra(1, image), BlockExtra(1, other)],
        ),
        ("empty namespace values", "empty", list(range(65)), []),
    ]
    for name, namespace_name, tokens, extras in cases:
        namespace = namespaces()[namespace_name]
        data = tokens_to_bytes(tokens)
        step = int(namespace.block_tokens)
        tail = tail_key(namespace.digest(), data, step, extras)
        yield {
            "name": name,
            "namespace": namespace_name,
            "block_tokens": step,
            "tokens": tokens,
            "extras": [{"row": e.row, "digest": e.digest.hex()} for e in extras],
            "keys": [key.hex() for key in prefix_chain(namespace.digest(), data, step, extras)],
            "tail_key": tail.hex() if tail else None,
        }


def keys_document() -> dict[str, Any]:
    return {
        "comment": "Made by tests/vectors/make.py. Rows of extras count from the prompt's start.",
        "namespaces": [
            {
                "name": name,
                "fields": [{"name": field, "value": value} for field, value in namespace.fields()],
                "digest": namespace.digest().hex(),
            }
            for name, namespace in namespaces().items()
        ],
        "chains": list(chains()),
    }
