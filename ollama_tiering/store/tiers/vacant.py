"""Directories of namespaces that hold no block any more: what is left of models that are gone.

Looks at the files, follows no link, changes nothing. A directory with anything else in it, a
quarantined block or a file that is not the store's, is not vacant.
"""

from __future__ import annotations

import os
from collections.abc import Collection, Iterator
from pathlib import Path

from ollama_tiering.store.block.key import NamespaceId, digest_from_hex
from ollama_tiering.store.tiers.names import DESCRIPTION_NAME, VERSION_DIRECTORY
from ollama_tiering.store.tiers.other_bytes import physical_bytes
from ollama_tiering.system.directories import entries


def vacant(directory: Path, in_use: Collection[bytes]) -> Iterator[tuple[NamespaceId, int]]:
    """(namespace, physical bytes) of each below a tier's directory that is none of `in_use`."""
    for entry in entries(directory / VERSION_DIRECTORY):
        namespace = digest_from_hex(entry.name)
        if namespace is None or namespace in in_use or not entry.is_dir(follow_symlinks=False):
            continue
        stored_bytes = _bytes_if_vacant(entry)
        if stored_bytes is not None:
            yield NamespaceId(namespace), stored_bytes


def _bytes_if_vacant(directory: os.DirEntry[str]) -> int | None:
    try:
        total = physical_bytes(directory.stat(follow_symlinks=False))
        for inner in entries(Path(directory.path)):
            if inner.is_dir(follow_symlinks=False):
                empty = not entries(Path(inner.path))
            else:
                empty = inner.name == DESCRIPTION_NAME
            if not empty:
                return None
            total += physical_bytes(inner.stat(follow_symlinks=False))
    except FileNotFoundError:  # going just now
        return None
    return total
