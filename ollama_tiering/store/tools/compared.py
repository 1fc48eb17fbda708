"""What an engine has computed again, beside what is stored of it: compared, and put aside."""

from __future__ import annotations

from collections.abc import Sequence

from ollama_tiering.store.block.key import BlockKey, NamespaceId
from ollama_tiering.store.books.compared import Compared as Compared
from ollama_tiering.store.books.compared import OtherRows as OtherRows
from ollama_tiering.store.books.compared import compare
from ollama_tiering.store.tiered import TieredStore
from ollama_tiering.store.upkeep import damage


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
        """See damage.put_aside."""
        damage.put_aside(self._state, namespace, key)
