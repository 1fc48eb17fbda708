"""What removed blocks leave behind on this host's tiers: quarantined copies, unfinished writes.

They hold tokens like any block file. The name says which block it is; the header of a quarantined
copy, where it can still be read, also says which block came before.
"""

from __future__ import annotations

import logging
from collections.abc import Collection, Iterator
from pathlib import Path

from ollama_tiering.store.block.blockfile import read_meta
from ollama_tiering.store.block.key import BlockKey
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
    """Of these blocks, and of quarantined ones before and after them; of all blocks with None.

    `alone`: nobody else writes into the directories now. What cannot be removed is said in the log.
    """
    found = list(_remains(state))
    wanted = None if keys is None else _with_relatives(keys, found)
    for level, directory, one in found:
        if wanted is not None and one.key not in wanted:
            continue
        try:
            if one.what is What.TEMPORARY:
                if is_leftover(state, level, one, alone=alone):
                    remove_file(directory, one)
            elif one.namespace is not None and one.key is not None:
                level.tier.remove_quarantined(one.namespace, one.key)
                remove_file(directory, one)  # one that the tier did not know of
        except OSError as error:
            log.warning("remains of a removed block stay: path=%s error=%s", one.path, error)
        with state.lock:
            state.count_overhead(level)


def _remains(state: StoreState) -> Iterator[_Remains]:
    """A shared tier's are removed by its own thread, with the block."""
    for level in state.levels:
        directory = level.tier.directory
        if directory is None or level.shared is not None:
            continue
        for found in walk(directory):
            if found.what in (What.QUARANTINED, What.TEMPORARY):
                yield level, directory, found


def _with_relatives(keys: Collection[BlockKey], found: list[_Remains]) -> set[BlockKey]:
    """The keys, and those of quarantined blocks that hang together with them."""
    wanted = set(keys)
    parents = {
        one.key: parent
        for _, directory, one in found
        if one.key is not None and one.what is What.QUARANTINED
        if (parent := _parent(directory, one)) is not None
    }
    while True:
        more = {key for key, parent in parents.items() if parent in wanted}
        more |= {parents[key] for key in wanted & parents.keys() if parents[key] in parents}
        if more <= wanted:
            return wanted
        wanted |= more


def _parent(directory: Path, found: FoundFile) -> BlockKey | None:
    try:
        with (
            open_below(directory, found.parts) as below,
            regular_file(found.name, READ, below) as (fd, info),
        ):
            return BlockKey(read_meta(fd_reader(fd), info.st_size).parent)
    except (OSError, CorruptBlock, UnsupportedFormat):
        return None
