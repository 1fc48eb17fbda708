"""The last partings, in memory only: what a restart loses here nobody needs. Tokens are kept
packed, and no text ever is.
"""

from __future__ import annotations

import zlib
from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Final

from ollama_tiering.store.tools.partings import LEAST_LOST, Parting

MOST: Final = 256
MOST_WITHOUT_LOSS: Final = 64  # of prompts that only began like others
MOST_BYTES: Final = 10 << 20  # of their packed tokens
_LEVEL: Final = 1  # of zlib: tokens are two thirds zeros, which goes fast
_PER_PARTING: Final = 1 << 10  # bytes of everything else


@dataclass(slots=True, eq=False)
class KeptParting:
    """`parting` has no tokens here: they are in `packed`. `computed_tokens` are None before the
    engine has said what became of the request.
    """

    parting: Parting
    packed: tuple[bytes, bytes, bytes]
    computed_tokens: int | None = None
    num_ctx: int = 0  # of a slot; 0: not known

    @property
    def size_bytes(self) -> int:
        return sum(map(len, self.packed)) + _PER_PARTING

    @property
    def lost_tokens(self) -> int:
        """Never more than were computed."""
        lost = self.parting.lost_tokens
        return lost if self.computed_tokens is None else min(lost, self.computed_tokens)

    def unpacked(self) -> Parting:
        """With its tokens."""
        before, asked, stored = (zlib.decompress(one) if one else b"" for one in self.packed)
        return replace(self.parting, before=before, asked=asked, stored=stored)


def kept(parting: Parting, *, tokens: bool) -> KeptParting:
    """Without `tokens`, none of them is kept."""
    sides = parting.before, parting.asked, parting.stored
    packed = tuple(zlib.compress(side, _LEVEL) if tokens and side else b"" for side in sides)
    bare = replace(parting, before=b"", asked=b"", stored=b"")
    return KeptParting(bare, (packed[0], packed[1], packed[2]))


class PartingRecord:
    """Not thread-safe. The oldest goes when there are too many, or too large ones."""

    def __init__(self) -> None:
        self._kept: deque[KeptParting] = deque()
        self.size_bytes = 0

    def __iter__(self) -> Iterator[KeptParting]:
        """The latest first."""
        return reversed(self._kept)

    def __len__(self) -> int:
        return len(self._kept)

    def add(self, one: KeptParting) -> None:
        self._kept.append(one)
        self.size_bytes += one.size_bytes
        if one.parting.lost_tokens < LEAST_LOST:
            others = [other for other in self._kept if other.parting.lost_tokens < LEAST_LOST]
            if len(others) > MOST_WITHOUT_LOSS:
                self.drop(others[0])
        while len(self._kept) > MOST or self.size_bytes > MOST_BYTES:
            self.size_bytes -= self._kept.popleft().size_bytes

    def drop(self, one: KeptParting) -> None:
        self._kept.remove(one)
        self.size_bytes -= one.size_bytes
