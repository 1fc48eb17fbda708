"""A namespace's description: what it is the digest of, as the text of `namespace.json` and checked.

A client writes it: without a bound, one description could take a tier's whole budget.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Final

from ollama_tiering.store.block.key import NamespaceId, namespace_digest
from ollama_tiering.store.errors import InvalidBlock

Fields = tuple[tuple[str, str], ...]  # (name, value) in the order they are hashed

MAX_TEXT_BYTES: Final = 64 << 10  # eight times that of a model with 256 layers


def namespace_text(fields: Sequence[tuple[str, str]]) -> bytes:
    """InvalidBlock when it is too long."""
    text = json.dumps(dict(fields), indent=1, ensure_ascii=False).encode() + b"\n"
    if len(text) > MAX_TEXT_BYTES:
        raise InvalidBlock(
            f"a namespace's description may have {MAX_TEXT_BYTES} bytes, this one has {len(text)}"
        )
    return text


def checked_fields(pairs: list[tuple[object, object]], namespace: NamespaceId) -> Fields:
    """The pairs, if they are text and the namespace is their digest; else none."""
    fields = tuple((n, v) for n, v in pairs if isinstance(n, str) and isinstance(v, str))
    try:
        right = len(fields) == len(pairs) and namespace_digest(fields) == namespace
    except UnicodeEncodeError:  # lone surrogates
        return ()
    return fields if right else ()
