"""The keys of a prompt's blocks, by their tokens and by which rows they have."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from ollama_tiering.protocol.engine.messages import EngineExtra
from ollama_tiering.sidecar.engine.identity import BLOCK_TOKENS
from ollama_tiering.sidecar.engine.turns import PIECE_BLOCKS
from ollama_tiering.store import (
    TOKEN_BYTES,
    BlockExtra,
    BlockKey,
    NamespaceId,
    block_key,
    extras_of,
)

STEP_BYTES = BLOCK_TOKENS * TOKEN_BYTES


class Chains:
    """Of one engine; remembers the last one. Used by one thread at a time."""

    def __init__(self, namespace: NamespaceId) -> None:
        self._namespace = namespace
        self._tokens = b""
        self._fingerprints: Sequence[bytes] = ()
        self._keys: list[BlockKey] = []

    def in_pieces(
        self, tokens: bytes, extras: Sequence[BlockExtra], fingerprints: Sequence[bytes]
    ) -> Iterator[list[BlockKey]]:
        """The keys of the leading blocks whose fingerprints are known, the tail's among them. A
        bounded piece of work at a time.
        """
        keys = [] if extras else self._keys[: self._same(tokens, fingerprints)]
        parent: bytes = keys[-1] if keys else self._namespace
        yield list(keys)
        for first in range(len(keys), len(fingerprints), PIECE_BLOCKS):
            piece: list[BlockKey] = []
            for index in range(first, min(first + PIECE_BLOCKS, len(fingerprints))):
                inside = tokens[index * STEP_BYTES : (index + 1) * STEP_BYTES]
                beside = extras_of(extras, index * BLOCK_TOKENS, BLOCK_TOKENS)
                parent = block_key(parent, inside, beside, fingerprints[index])
                piece.append(parent)
            keys += piece
            yield piece
        if not extras:
            self._tokens, self._fingerprints, self._keys = tokens, fingerprints, keys

    def _same(self, tokens: bytes, fingerprints: Sequence[bytes]) -> int:
        """How many whole blocks it begins with as the last one did."""
        same, most = 0, min(len(tokens), len(self._tokens)) // STEP_BYTES
        for mine, last in zip(fingerprints, self._fingerprints, strict=False):
            here = slice(same * STEP_BYTES, (same + 1) * STEP_BYTES)
            if same >= most or mine != last or tokens[here] != self._tokens[here]:
                break
            same += 1
        return same


def block_extras(extras: Sequence[EngineExtra]) -> list[BlockExtra]:
    return [BlockExtra(extra.position, extra.digest) for extra in extras]
