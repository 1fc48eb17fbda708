"""What the books say, read in one hold of the lock."""

from __future__ import annotations

from ollama_tiering.store.block.key import BlockKey, NamespaceId
from ollama_tiering.store.books.state import StoreState
from ollama_tiering.store.books.tree import BlockRecord


def records(state: StoreState, *, expire: bool = False) -> list[BlockRecord]:
    """Lists those of all blocks. `expire`: leases that are over are ended first."""
    with state.lock:
        if expire:
            state.expire()
        return list(state.tree)


def level_sums(state: StoreState) -> list[tuple[int, int]]:
    """(blocks, their physical bytes) of every level."""
    with state.lock:
        return [(len(level.lru), level.lru.used_bytes) for level in state.levels]


def is_being_written(state: StoreState, key: BlockKey) -> bool:
    """Whether a writer has reserved the block and not committed it."""
    with state.lock:
        return key in state.writing


def held_of(state: StoreState, namespaces: frozenset[NamespaceId]) -> set[NamespaceId]:
    """Those of which bytes lie in any tier."""
    with state.lock:
        return {one for one in namespaces for level in state.levels if one in level.held_bytes}


def pinned_chains(state: StoreState, namespace: NamespaceId) -> list[BlockKey]:
    """Last blocks of the chains of the namespace that a person pinned."""
    with state.lock:
        return [pin.key for pin in state.pins if pin.namespace == namespace]
