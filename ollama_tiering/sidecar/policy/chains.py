"""The keys of a text's blocks, by their tokens and by which rows they have."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Final

from ollama_tiering.store import (
    TOKEN_BYTES,
    BlockExtra,
    BlockKey,
    NamespaceId,
    block_key,
    extras_of,
)

PIECE_KEYS: Final = 256  # computed in one piece: about a millisecond


class Chains:
    """Of one engine; remembers the last one. Used by one thread at a time."""

    def __init__(self, namespace: NamespaceId, block_tokens: int) -> None:
        self.namespace: Final = namespace
        self.block_tokens: Final = block_tokens
        self._step_bytes = block_tokens * TOKEN_BYTES
        self._tokens = b""
        self._fingerprints: Sequence[bytes] = ()
        self._keys: list[BlockKey] = []

    def in_pieces(
        self, tokens: bytes, extras: Sequence[BlockExtra], fingerprints: Sequence[bytes]
    ) -> Iterator[list[BlockKey]]:
        """The keys of the leading blocks, one for each fingerprint, the tail's among them: an empty
        fingerprint where tokens decide the bits of rows. A bounded piece of work at a time.
        """
        step_bytes, block_tokens = self._step_bytes, self.block_tokens
        keys = [] if extras else self._keys[: self._same(tokens, fingerprints)]
        parent: bytes = keys[-1] if keys else self.namespace
        yield list(keys)
        for first in range(len(keys), len(fingerprints), PIECE_KEYS):
            piece: list[BlockKey] = []
            for index in range(first, min(first + PIECE_KEYS, len(fingerprints))):
                inside = tokens[index * step_bytes : (index + 1) * step_bytes]
                beside = extras_of(extras, index * block_tokens, block_tokens)
                parent = block_key(parent, inside, beside, fingerprints[index])
                piece.append(parent)
            keys += piece
            yield piece
        if not extras:
            self._tokens, self._fingerprints, self._keys = tokens, fingerprints, keys

    def _same(self, tokens: bytes, fingerprints: Sequence[bytes]) -> int:
        """How many whole blocks it begins with as the last one did."""
        same, most = 0, min(len(tokens), len(self._tokens)) // self._step_bytes
        for mine, last in zip(fingerprints, self._fingerprints, strict=False):
            here = slice(same * self._step_bytes, (same + 1) * self._step_bytes)
            if same >= most or mine != last or tokens[here] != self._tokens[here]:
                break
            same += 1
        return same
