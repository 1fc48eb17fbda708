"""What the author of an engine imports; beside it, the administration through a sidecar."""

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
