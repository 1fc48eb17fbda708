"""GGUF files with a vocabulary and nothing else, written byte by byte."""

from __future__ import annotations

import struct
from pathlib import Path
from typing import Any

U32, INT32, STRING, ARRAY = 4, 5, 8, 9
NORMAL, CONTROL, BYTE = 1, 3, 6

Token = tuple[str, int]  # and its type


def string(text: str | bytes) -> bytes:
    raw = text.encode() if isinstance(text, str) else text
    return struct.pack("<Q", len(raw)) + raw


def array(kind: int, items: list[Any]) -> bytes:
    packed = [string(item) if kind == STRING else struct.pack("<i", item) for item in items]
    return struct.pack("<IIQ", ARRAY, kind, len(items)) + b"".join(packed)


def gguf(values: dict[str, bytes]) -> bytes:
    """`values` are packed, with their types."""
    head = b"GGUF" + struct.pack("<IQQ", 3, 0, len(values))
    return head + b"".join(string(name) + value for name, value in values.items())


def vocabulary_file(path: Path, tokens: list[Token], *, model: str = "gpt2") -> Path:
    values = {
        "general.architecture": struct.pack("<I", STRING) + string("qwen3"),
        "qwen3.block_count": struct.pack("<II", U32, 28),
        "tokenizer.ggml.merges": array(STRING, ["a b"] * 3),
        "tokenizer.ggml.token_type": array(INT32, [kind for _, kind in tokens]),
        "tokenizer.ggml.model": struct.pack("<I", STRING) + string(model),
        "tokenizer.ggml.scores": array(INT32, [0] * len(tokens)),
        "tokenizer.ggml.tokens": array(STRING, [name for name, _ in tokens]),
    }
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(gguf(values))
    return path
