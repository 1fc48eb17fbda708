"""After `rm` no byte of a removed prompt is left below the tiers' directories."""

from __future__ import annotations

import sqlite3
from collections.abc import Iterator
from pathlib import Path

import pytest

from measure.store import samples
from ollama_tiering.store.block.key import BlockKey, tokens_to_bytes
from ollama_tiering.store.tiers.contract import TierKind
from ollama_tiering.store.tiers.directory import FsTier
from ollama_tiering.store.tiers.names import INDEX_NAME
from ollama_tiering.store.tools.admin import Administration
from ollama_tiering.store.upkeep.index import BlockIndex
from ollama_tiering.store.values import Selection
from tests.unit.store.administration import Tools
from tests.unit.store.support import Bench

SECRET = range(1_000_000, 1_000_020)
OTHER = range(2_000_000, 2_000_012)


@pytest.fixture
def tools(tmp_path: Path) -> Iterator[Tools]:
    made = Tools(tmp_path)
    yield made
    made.bench.store.close()


def traces(root: Path, tokens: range) -> set[str]:
    """Files that hold any block's worth of these tokens, as they lie in a header or the index."""
    parts = [tokens_to_bytes(tokens[at : at + 4]) for at in range(0, len(tokens), 4)]
    return {
        path.name
        for path in root.rglob("*")
        if path.is_file() and any(part in path.read_bytes() for part in parts)
    }


def rm(tools: Tools, blocks: list[samples.SampleBlock] | None = None) -> None:
    ids = (blocks[-1].key.hex(),) if blocks else ()
    tools.admin.remove(Selection(ids=ids), dry_run=False)


def test_nothing_is_left_in_the_index(tools: Tools, tmp_path: Path) -> None:
    blocks = tools.put(SECRET)
    tools.put(OTHER)
    tools.bench.store.flush_index()
    index = {INDEX_NAME, f"{INDEX_NAME}-wal"}
    assert traces(tmp_path, SECRET) & index
    rm(tools, blocks)
    assert traces(tmp_path, SECRET) == set()
    assert traces(tmp_path, OTHER)


def test_nor_after_old_age_was_collected(tools: Tools, tmp_path: Path) -> None:
    tools.put(SECRET)
    tools.bench.tick(1000)
    tools.put(OTHER)
    tools.bench.store.flush_index()
    collect = tools.admin.collect
    collect(older_than_seconds=500, models=None, dry_run=True)
    assert INDEX_NAME in traces(tmp_path, SECRET) or f"{INDEX_NAME}-wal" in traces(tmp_path, SECRET)
    collect(older_than_seconds=500, models=None, dry_run=False)
    assert traces(tmp_path, SECRET) == set()
    assert traces(tmp_path, OTHER)


def test_nor_when_its_pages_were_written_often(tools: Tools, tmp_path: Path) -> None:
    """Rows move between pages as the table grows and shrinks."""
    secret = tools.put(SECRET)
    many = [tools.put(range(start, start + 16)) for start in range(10_000, 10_000 + 40 * 16, 16)]
    for blocks in many:
        tools.bench.match(SECRET)
        tools.bench.store.flush_index()
        rm(tools, blocks)
    assert traces(tmp_path, SECRET)
    rm(tools, secret)
    assert traces(tmp_path, SECRET) == set()


def quarantine(tools: Tools, key: BlockKey, at: int) -> None:
    """All copies of the block are damaged at that byte, found so, and put out of the way."""
    for tier in ("ram", "local"):
        path = tools.file(tier, key)
        fingerprint = bytearray(path.read_bytes())
        fingerprint[at] ^= 1
        path.chmod(0o600)
        path.write_bytes(fingerprint)
        path.chmod(0o400)
    assert tools.bench.store.report_corrupt(samples.namespace(layers=1).digest(), key)


PAYLOAD, HEADER = 4100, 40


@pytest.mark.parametrize(
    ("position", "at"),
    [(0, PAYLOAD), (2, PAYLOAD), (4, PAYLOAD), (0, HEADER), (2, HEADER)],
    ids=["first", "middle", "last", "first, header", "middle, header"],
)
def test_quarantined_files_of_the_chain_go_too(
    tools: Tools, tmp_path: Path, position: int, at: int
) -> None:
    blocks = tools.put(SECRET)
    other = tools.put(OTHER)
    quarantine(tools, other[-1].key, PAYLOAD)
    quarantine(tools, blocks[position].key, at)
    names = {f"{block.key.hex()}.kvb.bad" for block in (other[-1], blocks[position])}
    assert {path.name for path in tmp_path.rglob("*.bad")} == names
    for chain in tools.chains():
        if chain.key not in {block.key for block in other}:
            tools.admin.remove(Selection(ids=(chain.key.hex(),)), dry_run=False)
    assert traces(tmp_path, SECRET) == set()
    assert {path.name for path in tmp_path.rglob("*.bad")} == {f"{other[-1].key.hex()}.kvb.bad"}
    assert tools.bench.state.levels[1].tier.quarantined_bytes() > 0


def test_all_takes_every_quarantined_file_and_unfinished_write(
    tools: Tools, tmp_path: Path
) -> None:
    blocks = tools.put(SECRET)
    quarantine(tools, blocks[-1].key, HEADER)  # of whose chain nothing can be told
    quarantine(tools, blocks[0].key, PAYLOAD)
    leftover = tools.file("local", blocks[1].key).with_suffix(".1234.tmp")
    leftover.write_bytes(blocks[1].data)
    rm(tools)
    assert traces(tmp_path, SECRET) == set()
    assert not leftover.exists()
    assert tools.bench.state.levels[1].tier.quarantined_bytes() == 0


def test_what_is_being_written_stays(tmp_path: Path) -> None:
    """While a sidecar runs, a young temporary file is somebody's."""
    tools = Tools(tmp_path)
    tools.admin = Administration(tools.bench.store, alone=False)
    (block,) = tools.put(range(4))
    young = tools.file("local", block.key).with_suffix(".1234.tmp")
    young.write_bytes(b"x")
    tools.bench.state.wall_clock = lambda: young.stat().st_ctime + 10
    rm(tools)
    assert young.exists()
    tools.bench.state.wall_clock = lambda: young.stat().st_ctime + 4000
    rm(tools)
    assert not young.exists()
    tools.bench.store.close()


def test_a_dry_run_leaves_everything(tools: Tools, tmp_path: Path) -> None:
    blocks = tools.put(SECRET)
    quarantine(tools, blocks[-1].key, PAYLOAD)
    before = {str(path): path.read_bytes() for path in tmp_path.rglob("*.kvb*")}
    tools.admin.remove(Selection(), dry_run=True)
    assert {str(path): path.read_bytes() for path in tmp_path.rglob("*.kvb*")} == before


def test_an_index_of_before_is_cleaned_once_and_kept(tmp_path: Path) -> None:
    """It was written without overwriting what it deleted."""
    tools = Tools(tmp_path)
    tools.put(OTHER)
    tools.bench.store.close()
    path = tmp_path / "local" / INDEX_NAME
    with sqlite3.connect(path) as connection:
        connection.execute("PRAGMA secure_delete = OFF")
        connection.execute("CREATE TABLE old (secret BLOB)")
        rows = [(tokens_to_bytes(SECRET),)] * 200
        connection.executemany("INSERT INTO old VALUES (?)", rows)
        connection.commit()
        connection.execute("DROP TABLE old")
        connection.execute("ALTER TABLE blocks DROP COLUMN fingerprint")
        connection.execute("PRAGMA user_version = 4")
    connection.close()
    assert traces(tmp_path, SECRET)
    index = BlockIndex(path)
    assert not index.rebuilt
    assert len(list(index.load())) > 0
    assert traces(tmp_path, SECRET) == set()
    index.close()


def test_without_a_sidecar_too(tmp_path: Path) -> None:
    tools = Tools(tmp_path)
    blocks = tools.put(SECRET)
    tools.bench.store.close()
    bench = Bench(
        tiers=[(FsTier(TierKind.LOCAL, tmp_path / "local"), 64 << 20)],
        index_path=tmp_path / "local" / INDEX_NAME,
    )
    admin = Administration(bench.store, alone=True)
    admin.remove(Selection(ids=(blocks[-1].key.hex(),)), dry_run=False)
    assert traces(tmp_path / "local", SECRET) == set()
    bench.store.close()
    assert traces(tmp_path / "local", SECRET) == set()
