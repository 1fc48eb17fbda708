"""Chains that are in the books only, and how much is done in one hold of the store's lock."""

from __future__ import annotations

from typing import Any, Final

import pytest

from ollama_tiering.store.block.key import BlockKey, prefix_chain, tokens_to_bytes
from ollama_tiering.store.books.tree import BlockRecord
from tests.unit.store.support import BLOCK_TOKENS, FILE_BYTES, NAMESPACE, Bench

MANY: Final = 60_000  # blocks: more than a look-up may find in one hold
MOST_PER_HOLD: Final = 1024  # of the lock, in blocks


def in_books(bench: Bench, blocks: int) -> tuple[list[BlockKey], bytes]:
    """A chain that is in the books only: a look-up asks no file. Its keys and tokens."""
    tokens = tokens_to_bytes(range(blocks * BLOCK_TOKENS))
    keys = prefix_chain(NAMESPACE, tokens, BLOCK_TOKENS)
    parent: bytes = NAMESPACE
    step = len(tokens) // blocks
    with bench.state.lock:
        for index, key in enumerate(keys):
            own = tokens[index * step : (index + 1) * step]
            record = BlockRecord(key, NAMESPACE, parent, own, BLOCK_TOKENS, FILE_BYTES, bench.now)
            bench.state.add_copy(record, bench.state.levels[0], FILE_BYTES)
            parent = key
    return keys, tokens


class Holds:
    """Stands for the store's lock; knows how many blocks were dealt with in each hold."""

    def __init__(self, bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
        self.holds: list[int] = []
        self._held = False
        self._patch = monkeypatch
        monkeypatch.setattr(bench.state, "lock", self)

    def count(self, owner: object, name: str, *, results: bool = False) -> None:
        """Counts what `owner.name` is given in its first argument, or gives."""
        call = getattr(owner, name)

        def counted(_: object, first: Any, *more: Any, **options: Any) -> Any:
            assert self._held
            if results:
                result = call(first, *more, **options)
                self.holds[-1] += len(result)
                return result
            blocks = [first] if isinstance(first, bytes) else list(first)
            self.holds[-1] += len(blocks)
            return call(first if isinstance(first, bytes) else blocks, *more, **options)

        self._patch.setattr(type(owner), name, counted)

    def __enter__(self) -> None:
        assert not self._held
        self._held = True
        self.holds.append(0)

    def __exit__(self, *_: object) -> None:
        self._held = False
