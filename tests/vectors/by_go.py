"""What the Go side was told to write (by_go.json): by_go/*.kvb, as it lies in people's stores.

The Go engines wrote headers themselves until the sidecar did, which names blocks alike.
"""

from __future__ import annotations

from dataclasses import asdict
from typing import Any

from ollama_tiering.store.block.key import BlockExtra, LayerSpec, block_key, tokens_to_bytes
from tests.vectors.building import CREATED, IMAGE
from tests.vectors.keys import INT32_MAX, INT32_MIN, namespaces


def payload(segment: int, length: int) -> bytes:
    """What lies in a segment, by its number in the file."""
    return bytes((31 * segment + 7 * at + at // 251) % 256 for at in range(length))


def document() -> dict[str, Any]:
    return {
        "comment": "Made by tests/vectors/make.py: blocks for the Go side to write into by_go/. "
        "Byte `at` of segment s is (31 s + 7 at + at ÷ 251, rounded down) mod 256. `window`: the "
        "block is one of a window, its parent the block it hangs on; cells of its rows, `first` "
        "row of the parent that it has, at `position`; `last` of its window, with `others`.",
        "created_unix_seconds": CREATED,
        "blocks": _blocks(),
    }


def _layer(spec: LayerSpec, k_row_bytes: int, v_row_bytes: int) -> dict[str, Any]:
    return asdict(spec) | {"k_row_bytes": k_row_bytes, "v_row_bytes": v_row_bytes}


def _entry(
    file: str, tokens: list[int], layers: list[dict[str, Any]], **other: Any
) -> dict[str, Any]:
    digest = namespaces()["qwen3"].digest().hex()
    return {
        "file": f"{file}.kvb",
        "namespace": digest,
        "parent": digest,
        "first_position": 0,
        "tokens": tokens,
        "extras": [],
        "dtype": "f16",
        "layers": layers,
        "window": None,
    } | other


def _blocks() -> list[dict[str, Any]]:
    plain = [_layer(LayerSpec(0, layer, 2, 4, 8), 16, 32) for layer in (0, 3)]
    wide = [_layer(LayerSpec(0, 0, 8, 128, 128), 2048, 2048)]
    latent = [_layer(LayerSpec(0, 0, 1, 576, 512), 1152, 1024)]
    q8_0 = [_layer(LayerSpec(0, 1, 4, 64, 64), 272, 272)]
    q4_0 = [_layer(LayerSpec(0, 1, 4, 64, 64), 144, 144)]
    chunked = _layer(LayerSpec(0, 1, 2, 4, 4, "chunked", 8192), 16, 16)
    children = [chunked, _layer(LayerSpec(1, 0, 2, 4, 8), 16, 32)]
    near = [_layer(LayerSpec(0, 0, 1, 8, 8, "swa", 4), 16, 16)]
    whole = list(range(64))
    namespace = namespaces()["qwen3"].digest()
    chain = block_key(namespace, tokens_to_bytes(whole)).hex()
    tail = {"parent": chain, "first_position": 64}
    image = {"row": 1, "digest": IMAGE.hex()}
    another = BlockExtra(2, bytes(range(32)))
    images = [image, {"row": another.row, "digest": another.digest.hex()}]
    window = {"child": 0, "first": 60, "position": 60, "cells": [9, 2, 0, 131_071], "last": False}
    end = window | {"cells": [1, 3, 4, 5], "last": True, "others": [chain]}
    on_chain = {"parent": chain, "first_position": 64}
    return [
        _entry("whole-block", whole, plain),
        _entry("tail-1-row", [INT32_MAX], plain, **tail),
        _entry("tail-63-rows", [INT32_MIN + i for i in range(63)], plain, **tail),
        _entry("segments-over-one-page", [9, 8, 7], wide),
        _entry("latent", [1, 2], latent),
        _entry("q8_0-cache", [1, 2, 3], q8_0, dtype="q8_0"),
        _entry("q4_0-cache", [1, 2, 3], q4_0, dtype="q4_0"),
        _entry("two-children", [1, 2, 3], children),
        _entry("images", [4, 0, 0, 5], plain, extras=images),
        _entry("window-block", [60, 61, 62, 63], near, window=window | {"others": []}, **on_chain),
        _entry("window-end", [60, 61, 62, 63], near, window=end, **on_chain),
    ]
