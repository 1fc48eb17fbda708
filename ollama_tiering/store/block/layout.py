"""Describes where the segments of a block lie, without what differs from block to block.

Blocks of one model differ in their tokens, their place in the chain and their checksums only. To
look through all segments of a header takes many times as long as to see that it has the layout of
one that was looked through before; a sidecar that was just started reads hundreds of headers for
one prompt.
"""

from __future__ import annotations

from typing import Final

from ollama_tiering.store.block.blockfile import is_its_rows
from ollama_tiering.store.block.key import DIGEST_BYTES, block_key
from ollama_tiering.store.block.pb import block_store_pb2 as pb

_MOST: Final = 64  # a layout for each number of rows
_OF_THE_BLOCK: Final = frozenset(
    (
        "namespace",
        "key",
        "parent",
        "first_position",
        "tokens",
        "created_unix_seconds",
        "fingerprint",
    )
)


class KnownLayouts:
    """Layouts of blocks with nothing but tokens. Used by one thread at a time."""

    def __init__(self) -> None:
        self._known: set[tuple[int, int, int, bytes]] = set()

    def passes(self, header: pb.BlockHeader, payload_offset: int, file_bytes: int) -> bool:
        """Whether it is known that `check_header` would find nothing wrong. False is no verdict."""
        return (
            _layout(header, payload_offset, file_bytes) in self._known
            and len(header.namespace) == len(header.parent) == DIGEST_BYTES
            and is_its_rows(header)
            and block_key(header.parent, header.tokens, (), header.fingerprint) == header.key
        )

    def learn(self, header: pb.BlockHeader, payload_offset: int, file_bytes: int) -> None:
        """Notes the layout of a header that `check_header` has passed. What is beside tokens has a
        part in the key, so such a block would not pass, and is not remembered.
        """
        if not header.extras and len(self._known) < _MOST:
            self._known.add(_layout(header, payload_offset, file_bytes))


def _layout(
    header: pb.BlockHeader, payload_offset: int, file_bytes: int
) -> tuple[int, int, int, bytes]:
    """All that `check_header` looks at but the key and the tokens that it is made of."""
    rest = pb.BlockHeader()
    rest.CopyFrom(header)
    for name in _OF_THE_BLOCK:
        rest.ClearField(name)
    for segment in rest.segments:
        segment.crc32c = 0
    described = rest.SerializeToString(deterministic=True)
    return payload_offset, file_bytes, len(header.tokens), described
