"""What an engine has computed again, beside what is stored of it: compared, and put aside."""

from __future__ import annotations

import logging
from collections.abc import Sequence

from ollama_tiering.store.block.key import BlockKey, NamespaceId
from ollama_tiering.store.books import copies
from ollama_tiering.store.books.compared import Compared as Compared
from ollama_tiering.store.books.compared import OtherRows as OtherRows
from ollama_tiering.store.books.compared import compare
from ollama_tiering.store.tiered import TieredStore
from ollama_tiering.store.upkeep import unusable

log = logging.getLogger(__name__)


class ComputedAgain:
    """Thread-safe."""

    def __init__(self, store: TieredStore) -> None:
        self._state = store.state

    def compare(
        self,
        namespace: NamespaceId,
        tokens: bytes,
        block_tokens: int,
        fingerprints: Sequence[bytes],
    ) -> Compared:
        return compare(self._state, namespace, tokens, block_tokens, fingerprints)

    def put_aside(self, namespace: NamespaceId, key: BlockKey) -> None:
        """Every copy that can be had is quarantined, so no prompt gets what follows it either. A
        copy out of reach now is found again: an OSError is said and leaves it.
        """
        found = copies.in_reach(self._state, namespace, key)
        if found is None:
            return
        try:
            for level in found[1]:
                try:
                    unusable.quarantine(self._state, level, namespace, key)
                except OSError as error:
                    said = "wrong rows stay: key=%s tier=%s reason=%s"
                    log.error(said, key.hex(), level.tier.kind.label, error.strerror)
        finally:
            copies.let_go(self._state, [key])
