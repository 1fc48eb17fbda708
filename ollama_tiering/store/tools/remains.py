"""What removed blocks leave behind on this host's tiers: quarantined copies and unfinished writes.

They contain tokens, like any block file. The name says which block it is. The header of a
quarantined copy, if it can still be read, also says which block came before it.
"""

from __future__ import annotations

import logging
from collections.abc import Collection, Iterator
from pathlib import Path

from ollama_tiering.store.block.blockfile import read_meta
from ollama_tiering.store.block.key import BlockKey
from ollama_tiering.store.books import copies
from ollama_tiering.store.books.state import Level, StoreState
from ollama_tiering.store.errors import CorruptBlock, UnsupportedFormat
from ollama_tiering.store.tiers.files import READ
from ollama_tiering.store.tiers.walk import FoundFile, What, remove_file, walk
from ollama_tiering.store.tools.verify import is_leftover
from ollama_tiering.system.directories import open_below, regular_file
from ollama_tiering.system.files import fd_reader

log = logging.getLogger(__name__)

_Remains = tuple[Level, Path, FoundFile]


def remove_remains(state: StoreState, keys: Collection[BlockKey] | None, *, alone: bool) -> None:
    """Removes remains of these blocks, and of quarantined blocks before and after them; with None,
    of all blocks. `alone`: nobody else writes into the directories now. What cannot be removed is
    logged.
    """
    remains = list(_remains(state))
    wanted = None if keys is None else _with_relatives(keys, remains)
    for level, directory, file in remains:
        if wanted is not None and file.key not in wanted:
            continue
        try:
            if file.what is What.TEMPORARY:
                if is_leftover(state, level, file, alone=alone):
                    remove_file(directory, file)
            elif file.namespace is not None and file.key is not None:
                level.tier.remove_quarantined(file.namespace, file.key)
                remove_file(directory, file)  # one that the tier did not know of
        except OSError as error:
            log.warning("remains of a removed block stay: path=%s error=%s", file.path, error)
        copies.recount(state, level)


def _remains(state: StoreState) -> Iterator[_Remains]:
    """Remains on a shared tier are removed by that tier's own thread, with the block."""
    for level in state.levels:
        directory = level.tier.directory
        if directory is None or level.shared is not None:
            continue
        for file in walk(directory):
            if file.what in (What.QUARANTINED, What.TEMPORARY):
                yield level, directory, file


def _with_relatives(keys: Collection[BlockKey], remains: list[_Remains]) -> set[BlockKey]:
    """The keys, and those of quarantined blocks that are connected with them."""
    wanted = set(keys)
    parents = {
        file.key: parent
        for _, directory, file in remains
        if file.key is not None and file.what is What.QUARANTINED
        if (parent := _parent(directory, file)) is not None
    }
    while True:
        more = {key for key, parent in parents.items() if parent in wanted}
        more |= {parents[key] for key in wanted & parents.keys() if parents[key] in parents}
        if more <= wanted:
            return wanted
        wanted |= more


def _parent(directory: Path, file: FoundFile) -> BlockKey | None:
    try:
        with (
            open_below(directory, file.parts) as below,
            regular_file(file.name, READ, below) as (fd, info),
        ):
            return BlockKey(read_meta(fd_reader(fd), info.st_size).parent)
    except (OSError, CorruptBlock, UnsupportedFormat):
        return None
