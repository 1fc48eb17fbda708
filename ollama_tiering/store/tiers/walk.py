"""Every file below a tier's directory, as it lies there. This only looks, and follows no link.

Blocks are what a scan would find. The tools judge the rest: quarantined blocks, what an interrupted
write left behind, and files that are not the store's, or that somebody else may write.
"""

from __future__ import annotations

import contextlib
import os
import re
import stat
from collections.abc import Collection, Iterator
from dataclasses import dataclass
from enum import Enum
from pathlib import Path
from typing import Final

from ollama_tiering.store.block.key import BlockKey, NamespaceId, digest_from_hex
from ollama_tiering.store.tiers.names import (
    BAD_SUFFIX,
    BLOCK_SUFFIX,
    DESCRIPTION_NAME,
    PINS_NAME,
    PROBE_PREFIX,
    TMP_SUFFIX,
    TOMBSTONES_NAME,
    VERSION_DIRECTORY,
)
from ollama_tiering.store.tiers.other_bytes import physical_bytes
from ollama_tiering.system.directories import entries, open_below, own_directory
from ollama_tiering.system.lacking import sync
from ollama_tiering.system.ownership import why_not_ours

_SHARD: Final = re.compile(r"[0-9a-f]{2}")
_TOP_TEMPORARY: Final = (PROBE_PREFIX, f".{PINS_NAME}.", f".{TOMBSTONES_NAME}.")


class Inside(Enum):
    """What a name stands for in the directory of a namespace."""

    BLOCKS = "directory of blocks"
    DESCRIPTION = "description"
    TEMPORARY = "temporary"
    FOREIGN = "foreign"


class What(Enum):
    """What a file is, in a directory of blocks or anywhere."""

    BLOCK = "block"
    QUARANTINED = "quarantined"
    TEMPORARY = "temporary"
    FOREIGN = "foreign"


@dataclass(frozen=True, slots=True)
class FoundFile:
    what: What
    parts: tuple[str, ...]  # directories below the tier's
    name: str
    stored_bytes: int
    changed: float  # Unix seconds
    namespace: NamespaceId | None = None
    key: BlockKey | None = None

    @property
    def path(self) -> str:
        return "/".join((*self.parts, self.name))


def namespaces(directory: Path) -> Iterator[tuple[NamespaceId | None, os.DirEntry[str]]]:
    """What lies where each namespace has its directory; None: by another name."""
    for entry in entries(directory / VERSION_DIRECTORY):
        namespace = digest_from_hex(entry.name)
        yield NamespaceId(namespace) if namespace is not None else None, entry


def inside(namespace: os.DirEntry[str]) -> Iterator[tuple[Inside, os.DirEntry[str]]]:
    """What lies in the directory of a namespace, by its name: it may be something else."""
    for entry in entries(Path(namespace.path)):
        if _SHARD.fullmatch(entry.name):
            what = Inside.BLOCKS
        elif entry.name == DESCRIPTION_NAME:
            what = Inside.DESCRIPTION
        elif entry.name.startswith(".") and entry.name.endswith(TMP_SUFFIX):
            what = Inside.TEMPORARY
        else:
            what = Inside.FOREIGN
        yield what, entry


def files(shard: os.DirEntry[str]) -> Iterator[tuple[What, BlockKey | None, os.DirEntry[str]]]:
    """What lies in a directory of blocks, by its name, and of which block; None: of none."""
    for entry in entries(Path(shard.path)):
        key = digest_from_hex(entry.name[:64])
        if key is None or entry.name[:2] != shard.name:
            yield What.FOREIGN, None, entry
            continue
        rest = entry.name[64:]
        if rest == BLOCK_SUFFIX:
            what = What.BLOCK
        elif rest == BLOCK_SUFFIX + BAD_SUFFIX:
            what = What.QUARANTINED
        elif rest.endswith(TMP_SUFFIX):
            what = What.TEMPORARY
        else:
            what = What.FOREIGN
        yield what, BlockKey(key), entry


def walk(directory: Path) -> Iterator[FoundFile]:
    """OSError of a directory that cannot be listed passes. A directory that is gone counts as
    empty.
    """
    for entry in entries(directory):
        if entry.name.startswith(_TOP_TEMPORARY):
            yield from _found(What.TEMPORARY, (), entry)
    for namespace, entry in namespaces(directory):
        parts = (VERSION_DIRECTORY, entry.name)
        if namespace is None or own_directory(entry):
            yield from _found(What.FOREIGN, parts[:1], entry)
            continue
        for what, inner in inside(entry):
            if what is Inside.BLOCKS and not own_directory(inner):
                for kind, key, file in files(inner):
                    of = namespace if key is not None else None
                    yield from _found(kind, (*parts, inner.name), file, of, key)
            elif what is Inside.TEMPORARY:
                yield from _found(What.TEMPORARY, parts, inner)
            elif what is not Inside.DESCRIPTION:
                yield from _found(What.FOREIGN, parts, inner)


def vacant(directory: Path, in_use: Collection[bytes]) -> Iterator[tuple[NamespaceId, int]]:
    """(namespace, physical bytes) of each directory of a namespace, none of `in_use`, that holds no
    block any more: what is left of models that are gone. One with anything else in it is not
    vacant: a quarantined block, a file that is not the store's.
    """
    for namespace, entry in namespaces(directory):
        if namespace is None or namespace in in_use or not entry.is_dir(follow_symlinks=False):
            continue
        stored_bytes = _bytes_if_vacant(entry)
        if stored_bytes is not None:
            yield namespace, stored_bytes


def remove_file(directory: Path, found: FoundFile) -> None:
    """Removes a file that the walk found, for good. A file that is gone is no error."""
    with contextlib.suppress(FileNotFoundError), open_below(directory, found.parts) as below:
        os.unlink(found.name, dir_fd=below)
        sync(below)


def _bytes_if_vacant(namespace: os.DirEntry[str]) -> int | None:
    try:
        total = physical_bytes(namespace.stat(follow_symlinks=False))
        for what, inner in inside(namespace):
            if inner.is_dir(follow_symlinks=False):
                empty = not entries(Path(inner.path))
            else:
                empty = what is Inside.DESCRIPTION
            if not empty:
                return None
            total += physical_bytes(inner.stat(follow_symlinks=False))
    except FileNotFoundError:  # going just now
        return None
    return total


def _found(
    what: What,
    parts: tuple[str, ...],
    entry: os.DirEntry[str],
    namespace: NamespaceId | None = None,
    key: BlockKey | None = None,
) -> Iterator[FoundFile]:
    try:
        info = entry.stat(follow_symlinks=False)
    except FileNotFoundError:
        return
    if not stat.S_ISREG(info.st_mode) or why_not_ours(info):
        what = What.FOREIGN
    yield FoundFile(what, parts, entry.name, physical_bytes(info), info.st_ctime, namespace, key)
