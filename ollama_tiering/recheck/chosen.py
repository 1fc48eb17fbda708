"""Which stored conversations are computed again, and what their tokens are."""

from __future__ import annotations

import random
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from ollama_tiering.store import BlockMeta, NamespaceId, read_meta
from ollama_tiering.store.values import ChainLine, Listing

if TYPE_CHECKING:
    from ollama_tiering.client.admin_client import SidecarAdministration
    from ollama_tiering.store.tools.chain_to_export import ChainToExport


@dataclass(frozen=True, slots=True)
class StoredText:
    """The first whole blocks of a conversation."""

    chain: ChainLine
    tokens: tuple[int, ...]
    blocks: int


def gives_one_answer(listing: Listing, namespace: bytes) -> bool:
    """Whether the engine says that the tokens alone decide the bits of its rows."""
    extra = dict(listing.descriptions.get(NamespaceId(namespace), ())).get("extra", "")
    return any(part.startswith("one_answer=") for part in extra.split(";"))


def latest(listing: Listing, namespace: bytes, most: int) -> list[ChainLine]:
    """What was restored comes first, then what was used last."""
    chains = [one for one in listing.chains if one.namespace == namespace and one.complete]
    chains.sort(key=lambda one: (one.hits > 0, one.last_use), reverse=True)
    return chains[:most]


def sampled(chains: list[ChainLine], count: int) -> list[ChainLine]:
    """So many of them, chosen at random; 0: all."""
    return random.sample(chains, min(count, len(chains))) if count else chains


def text_of(
    admin: SidecarAdministration, chain: ChainLine, block_tokens: int, most_tokens: int
) -> StoredText | None:
    """None if it has no whole block, or something else than tokens in it."""
    whole = admin.chain(chain.key.hex())
    count = max(1, most_tokens // block_tokens)
    tokens: list[int] = []
    blocks = 0
    for meta in _metas(admin, replace(whole, blocks=whole.blocks[:count], windows=())):
        if meta.extras or meta.rows < block_tokens:
            break
        tokens += memoryview(meta.tokens).cast("i").tolist()
        blocks += 1
    return StoredText(chain, tuple(tokens), blocks) if blocks else None


def _metas(admin: SidecarAdministration, part: ChainToExport) -> Iterator[BlockMeta]:
    for (key, _), opened in zip(part.blocks, admin.opened(part), strict=True):
        with opened as block:
            meta = read_meta(block.read_at, block.file_bytes)
            if meta.key != key:  # it was replaced meanwhile
                return
            yield meta
