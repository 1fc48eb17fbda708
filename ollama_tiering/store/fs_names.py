"""What the files of a directory tier are called (docs/format.md)."""

from __future__ import annotations

from typing import Final

from ollama_tiering.store.block.blockfile import BLOCK_SUFFIX
from ollama_tiering.store.block.key import BlockKey, NamespaceId

VERSION_DIRECTORY: Final = "v1"
BAD_SUFFIX: Final = ".bad"  # a damaged block, kept for a person to look at
TMP_SUFFIX: Final = ".tmp"  # a block while it is being written
LOCK_NAME: Final = ".lock"
DESCRIPTION_NAME: Final = "namespace.json"


def file_name(key: BlockKey) -> str:
    return key.hex() + BLOCK_SUFFIX


def shard(namespace: NamespaceId, key: BlockKey) -> tuple[str, str, str]:
    return VERSION_DIRECTORY, namespace.hex(), key.hex()[:2]
