"""What must hold on a disk after the power failed: the promises of docs/operations.md."""

from __future__ import annotations

import json
from pathlib import Path

from ollama_tiering.store.block.blockfile import buffer_reader, read_meta, verify_payload
from ollama_tiering.store.block.key import BlockKey
from ollama_tiering.store.tiered import TieredStore
from ollama_tiering.store.tiers.description_file import read_description
from ollama_tiering.store.tools.archive import open_archive
from ollama_tiering.store.tools.importing import check_archive
from ollama_tiering.store.upkeep.opening import count_files
from tests.fault.power_cut_work import EXPORTS, LOCAL, NAMESPACE, NS, Promise, Work

UNIT_BYTES = 512  # of st_blocks


def check(work: Work, root: Path, promise: Promise, written_bytes: int) -> None:
    """Before and after the store is opened. `written_bytes`: to the local tier before the cut."""
    whole = _files(root / LOCAL)
    _exports(root / EXPORTS, promise)
    store = work.open_at(root)  # never fails
    try:
        books = {record.key for record in store.state.tree}
        assert books == whole, "the books are the files, whatever the index was"
        _nothing_is_lost(work, whole, promise)
        assert not books & promise.removed, "removed, and back"
        _right_bytes(work, store)
        _rows(work, store, promise)
        pins = frozenset(pin.key for pin in store.state.pins)
        assert pins in promise.pins, "pins"
        assert store._daily.written_bytes >= written_bytes, "the count is behind the disk"
        if whole:
            assert read_description(root / LOCAL, NAMESPACE) == tuple(NS.fields()), "what it is"
        _budget(store, root / LOCAL)
    finally:
        store.close()
    assert not [*root.rglob("*.bad")], "a name without its content"
    assert not [*(root / LOCAL).rglob("*.tmp")], "an unfinished file stays"


def _files(directory: Path) -> set[BlockKey]:
    """Blocks under their names, each of them whole; every other file is as it was written, too."""
    for path in directory.rglob("*.json"):
        json.loads(path.read_bytes())
    found = set()
    for path in directory.rglob("*.kvb"):
        data = path.read_bytes()
        meta = read_meta(buffer_reader(data), len(data))
        verify_payload(meta, buffer_reader(data))
        assert path.stem == meta.key.hex()
        assert path.stat().st_mode & 0o777 == 0o400, "a block that can be written to"
        found.add(meta.key)
    return found


def _nothing_is_lost(work: Work, there: set[BlockKey], promise: Promise) -> None:
    for key in promise.durable:
        assert there.intersection(work.known.instead_of(key)), f"lost: {key.hex()}"


def _right_bytes(work: Work, store: TieredStore) -> None:
    for record in list(store.state.tree):
        leased = store.lease(record.namespace, [record.key])
        (block,) = leased.blocks
        served = store.read_part(block, 0, block.file_bytes)
        assert served == work.known.blocks[record.key].data, f"wrong bytes: {record.key.hex()}"
        store.release(leased.lease_id)


def _rows(work: Work, store: TieredStore, promise: Promise) -> None:
    """What a prompt finds is all that was safe of it."""
    for tokens, keys in work.known.chains.items():
        safe = 0
        for key in keys:
            if not promise.durable.intersection(work.known.instead_of(key)):
                break
            safe += work.known.blocks[key].rows
        assert work.rows(store, tokens) >= safe, f"{safe} rows of {tokens} were safe"


def _exports(directory: Path, promise: Promise) -> None:
    there = {path.name for path in directory.glob("[!.]*")}
    assert promise.exports <= there, "an archive is lost"
    for name in there:
        with open_archive(directory / name) as archive:
            check_archive(archive, lambda _: None)


def _budget(store: TieredStore, directory: Path) -> None:
    """The books know every byte, and what is too much goes."""
    store.flush_index()
    store.run_pending()
    count_files(store.state)
    level = store.state.levels[-1]
    used = sum(p.lstat().st_blocks * UNIT_BYTES for p in (directory, *directory.rglob("*")))
    assert level.physical_bytes == used, "what is used is not what is counted"
    assert used <= level.lru.budget_bytes, "over budget"
