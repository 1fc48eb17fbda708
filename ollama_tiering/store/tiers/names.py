"""The names of the files in a tier's directory (docs/format.md)."""

from __future__ import annotations

from typing import Final

from ollama_tiering.store.block.key import BlockKey, NamespaceId
from ollama_tiering.system.lacking import PROBE_PREFIX as PROBE_PREFIX

VERSION_DIRECTORY: Final = "v1"
BLOCK_SUFFIX: Final = ".kvb"
BAD_SUFFIX: Final = ".bad"  # a damaged file, kept for a person to look at
TMP_SUFFIX: Final = ".tmp"  # a block while it is being written
LOCK_NAME: Final = ".lock"
DESCRIPTION_NAME: Final = "namespace.json"
INDEX_NAME: Final = "index.sqlite"
PINS_NAME: Final = "pins.json"
TOMBSTONES_NAME: Final = "tombstones.json"
WRITTEN_NAME: Final = "written-today.json"  # bytes written to this disk today
ANNOUNCEMENT_PREFIX: Final = ".sidecar-"  # of one sidecar to others that share the directory


def file_name(key: BlockKey) -> str:
    return key.hex() + BLOCK_SUFFIX


def shard(namespace: NamespaceId, key: BlockKey) -> tuple[str, str, str]:
    return VERSION_DIRECTORY, namespace.hex(), key.hex()[:2]
