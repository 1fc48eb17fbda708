"""Keeps the index beside the books: the index is used by one thread at a time, this by any."""

from __future__ import annotations

import threading

from ollama_tiering.store.books.state import StoreState
from ollama_tiering.store.upkeep import opening
from ollama_tiering.store.upkeep.index import BlockIndex


class IndexKeeper:
    """Keeps an index, if there is one."""

    def __init__(self, state: StoreState, index: BlockIndex | None) -> None:
        self._state = state
        self._index = index
        self._using = threading.Lock()
        self._suspect = False

    def flush(self) -> None:
        """Writes what changed in the books."""
        if self._index is None:
            return
        with self._using:
            if self._suspect:
                self._suspect = False
                self._index.start_afresh()
            opening.save(self._state, self._index)

    def rebuild(self) -> None:
        """The next flush throws the index away and writes it anew from the books."""
        self._suspect = True

    def scrub(self) -> None:
        """Afterwards none of its files holds a token of what was removed."""
        self.flush()
        if self._index is not None:
            with self._using:
                self._index.scrub()
            opening.count_files(self._state)

    def close(self) -> None:
        if self._index is not None:
            with self._using:
                self._index.close()
