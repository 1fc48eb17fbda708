"""Which look-ups found less than the whole prompt, and what was evicted: noted in passing, for
whoever explains it later (store/tools/partings.py). In memory only, and bounded.

A note costs a look-up no more than a microsecond: it keeps the very bytes that the client sent.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Sequence
from typing import Final, NamedTuple

from ollama_tiering.store.block.key import TOKEN_BYTES, BlockKey, NamespaceId
from ollama_tiering.store.books.tree import BlockRecord

MOST_LOOK_UPS: Final = 64  # that nobody has looked at yet
MOST_BYTES: Final = 4 << 20  # of their tokens
MOST_EVICTED: Final = 1 << 13


class ShortLookUp(NamedTuple):
    """A look-up that found `matched_tokens` of its prompt; `last` is the last block it found, which
    may match in part.
    """

    unix_seconds: float
    namespace: NamespaceId
    tokens: bytes
    matched_tokens: int
    last: BlockRecord | None
    last_rows: int


# The same, which takes half the time to make.
_Note = tuple[float, NamespaceId, bytes, int, BlockRecord | None, int]


class Evicted(NamedTuple):
    key: BlockKey
    unix_seconds: float


class Watch:
    """Thread-safe. Notes nothing before somebody listens."""

    def __init__(self) -> None:
        self.listening = False
        self._lock = threading.Lock()
        self._short: deque[_Note] = deque()
        self._bytes = 0
        self._evicted: dict[int, Evicted] = {}  # by parent and tokens; the latest is last

    def asked(
        self,
        namespace: NamespaceId,
        tokens: bytes,
        found: Sequence[tuple[BlockRecord, int]],
        unix_seconds: float,
    ) -> None:
        """A look-up is over. One that found all but the last token fell short of nothing."""
        if not self.listening:
            return
        last, rows, matched = None, 0, 0
        if found:  # in part only the last block is
            last, rows = found[-1]
            matched = (len(found) - 1) * found[0][1] + rows
        size = len(tokens)
        if (matched + 1) * TOKEN_BYTES >= size:
            return
        with self._lock:
            self._short.append((unix_seconds, namespace, tokens, matched, last, rows))
            self._bytes += size
            if len(self._short) > MOST_LOOK_UPS or self._bytes > MOST_BYTES:
                self._trim()

    def take(self) -> ShortLookUp | None:
        """The oldest one that nobody has taken yet."""
        with self._lock:
            if not self._short:
                return None
            one = ShortLookUp(*self._short.popleft())
            self._bytes -= len(one.tokens)
            return one

    def _trim(self) -> None:
        while len(self._short) > MOST_LOOK_UPS or self._bytes > MOST_BYTES:
            self._bytes -= len(self._short.popleft()[2])

    def evicted(self, record: BlockRecord, unix_seconds: float) -> None:
        """The last copy of a block was evicted. The caller holds the store's lock."""
        if not self.listening:
            return
        name = hash((record.parent, record.tokens))
        self._evicted.pop(name, None)
        self._evicted[name] = Evicted(record.key, unix_seconds)
        if len(self._evicted) > MOST_EVICTED:
            del self._evicted[next(iter(self._evicted))]

    def gone(self, parent: bytes, tokens: bytes) -> Evicted | None:
        """The block of these tokens that followed `parent`, if it was evicted."""
        return self._evicted.get(hash((parent, tokens)))
