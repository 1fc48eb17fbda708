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

MOST_ASKED: Final = 64  # that nobody has looked at yet
MOST_BYTES: Final = 5 << 20  # of their tokens
MOST_EVICTED: Final = 1 << 14


class Asked(NamedTuple):
    """A look-up that found `matched_tokens` of its prompt; `last` is the last block it found, which
    may match in part.
    """

    unix_seconds: float
    namespace: NamespaceId
    tokens: bytes
    matched_tokens: int
    last: BlockRecord | None
    last_rows: int


class Evicted(NamedTuple):
    key: BlockKey
    unix_seconds: float


class Watch:
    """Thread-safe. Notes nothing before somebody listens."""

    def __init__(self) -> None:
        self.listening = False
        self._lock = threading.Lock()
        self._asked: deque[Asked] = deque()
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
        matched = sum(rows for _, rows in found)
        if matched >= len(tokens) // TOKEN_BYTES - 1:
            return
        last, rows = found[-1] if found else (None, 0)
        with self._lock:
            self._asked.append(Asked(unix_seconds, namespace, tokens, matched, last, rows))
            self._bytes += len(tokens)
            while len(self._asked) > MOST_ASKED or self._bytes > MOST_BYTES:
                self._bytes -= len(self._asked.popleft().tokens)

    def take(self) -> Asked | None:
        """The oldest one that nobody has taken yet."""
        with self._lock:
            if not self._asked:
                return None
            asked = self._asked.popleft()
            self._bytes -= len(asked.tokens)
            return asked

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
