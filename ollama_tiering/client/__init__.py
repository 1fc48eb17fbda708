"""A client of the block store, for authors of engines. `admin_client` is the administration of a
running sidecar.
"""

from __future__ import annotations

from ollama_tiering.client.block_client import BlockClient, PutResult
from ollama_tiering.client.restored import Block, BlockRef, Blocks, Match
from ollama_tiering.store import BlockExtra, Namespace

__all__ = [
    "Block",
    "BlockClient",
    "BlockExtra",
    "BlockRef",
    "Blocks",
    "Match",
    "Namespace",
    "PutResult",
]
