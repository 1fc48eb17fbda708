"""A namespace's description as the text of `namespace.json`, and how long that may be. Pure.

A client writes it: without a bound, one description could take a tier's whole budget.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Final

from ollama_tiering.store.errors import InvalidBlock

MAX_TEXT_BYTES: Final = 64 << 10  # eight times that of a model with 256 layers


def namespace_text(fields: Sequence[tuple[str, str]]) -> bytes:
    """InvalidBlock when it is too long."""
    text = json.dumps(dict(fields), indent=1, ensure_ascii=False).encode() + b"\n"
    if len(text) > MAX_TEXT_BYTES:
        raise InvalidBlock(
            f"a namespace's description may have {MAX_TEXT_BYTES} bytes, this one has {len(text)}"
        )
    return text
