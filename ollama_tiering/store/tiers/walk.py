"""Every file below a tier's directory, as it lies there: looks, follows no link, changes nothing.

Blocks are what a scan would find. The rest is what the tools judge: quarantined blocks, what an
interrupted write left behind, files that are not the store's (also because of who may write them).
"""

from __future__ import annotations

import contextlib
import os
import stat
from collections.abc import Iterator
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
from ollama_tiering.system.ownership import why_not_ours

_TOP_TEMPORARY: Final = (PROBE_PREFIX, f".{PINS_NAME}.", f".{TOMBSTONES_NAME}.")


class What(Enum):
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


def walk(directory: Path) -> Iterator[FoundFile]:
    """OSError of a directory that cannot be listed passes; one that is gone is empty."""
    for entry in entries(directory):
        if entry.name.startswith(_TOP_TEMPORARY):
            yield from _found(What.TEMPORARY, (), entry)
    for entry in entries(directory / VERSION_DIRECTORY):
        namespace = digest_from_hex(entry.name)
        parts = (VERSION_DIRECTORY, entry.name)
        if namespace is None or own_directory(entry):
            yield from _found(What.FOREIGN, parts[:1], entry)
            continue
        for inner in entries(Path(entry.path)):
            if len(inner.name) == 2 and not own_directory(inner):
                yield from _shard(NamespaceId(namespace), (*parts, inner.name), Path(inner.path))
            elif inner.name.startswith(".") and inner.name.endswith(TMP_SUFFIX):
                yield from _found(What.TEMPORARY, parts, inner)
            elif inner.name != DESCRIPTION_NAME:
                yield from _found(What.FOREIGN, parts, inner)


def remove_file(directory: Path, found: FoundFile) -> None:
    """Unlinks what the walk found, where it found it, for good; one that is gone is fine."""
    with contextlib.suppress(FileNotFoundError), open_below(directory, found.parts) as below:
        os.unlink(found.name, dir_fd=below)
        os.fsync(below)


def _shard(namespace: NamespaceId, parts: tuple[str, ...], directory: Path) -> Iterator[FoundFile]:
    for entry in entries(directory):
        key = digest_from_hex(entry.name[:64])
        rest = entry.name[64:]
        if key is None or entry.name[:2] != parts[-1]:
            yield from _found(What.FOREIGN, parts, entry)
            continue
        if rest == BLOCK_SUFFIX:
            what = What.BLOCK
        elif rest == BLOCK_SUFFIX + BAD_SUFFIX:
            what = What.QUARANTINED
        elif rest.endswith(TMP_SUFFIX):
            what = What.TEMPORARY
        else:
            what = What.FOREIGN
        yield from _found(what, parts, entry, namespace, BlockKey(key))


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
