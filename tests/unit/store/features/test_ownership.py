"""Files of another user, and files that others may write: not used, not removed, counted."""

from __future__ import annotations

import logging
from collections.abc import Callable
from pathlib import Path

import pytest

from measure.store import samples
from ollama_tiering.store.block.key import BlockKey
from ollama_tiering.store.tiers.contract import TierKind
from ollama_tiering.store.tiers.directory import FsTier
from ollama_tiering.store.tiers.shared_directory import SharedFsTier
from ollama_tiering.store.tools.verify import verify
from ollama_tiering.system.ownership import NotOurs
from tests.unit.store.administration import Tools
from tests.unit.store.spoilers import SPOILERS, all_may_write, foreign_owner
from tests.unit.store.support import NAMESPACE, Bench, path_of

Spoil = Callable[[Path], None]

spoilt = pytest.mark.parametrize("spoil", SPOILERS)


@pytest.fixture
def tools(tmp_path: Path) -> Tools:
    return Tools(tmp_path)


def leased(bench: Bench, blocks: list[samples.SampleBlock]) -> list[TierKind]:
    answer = bench.store.lease(NAMESPACE, [block.key for block in blocks])
    bench.store.release(answer.lease_id)
    return [block.tier for block in answer.blocks]


def spoil_file(tools: Tools, spoil: Spoil, tier: str, key: BlockKey) -> Path:
    path = tools.file(tier, key)
    spoil(path)
    return path


@spoilt
def test_it_is_not_handed_out_and_stays(
    tools: Tools, spoil: Spoil, caplog: pytest.LogCaptureFixture
) -> None:
    blocks = tools.put(range(8))
    path = spoil_file(tools, spoil, "ram", blocks[0].key)
    below = spoil_file(tools, spoil, "local", blocks[0].key)
    before = path.read_bytes()
    with caplog.at_level(logging.WARNING):
        assert leased(tools.bench, blocks) == []
        assert leased(tools.bench, blocks) == []
    tools.bench.store.run_pending()
    assert path.read_bytes() == below.read_bytes() == before
    assert tools.bench.store.report().counters.misses["not ours"] == 2
    lines = [r.getMessage() for r in caplog.records if "not ours" in r.getMessage()]
    assert len(lines) == 2  # one for each tier
    assert all("chown" in line for line in lines)


@spoilt
def test_another_copy_is_used_instead(tools: Tools, spoil: Spoil) -> None:
    blocks = tools.put(range(8))
    spoil_file(tools, spoil, "ram", blocks[0].key)
    assert leased(tools.bench, blocks) == [TierKind.LOCAL, TierKind.RAM]


@spoilt
@pytest.mark.parametrize("indexed", [False, True])
def test_a_start_does_not_take_it_for_a_block(tmp_path: Path, spoil: Spoil, indexed: bool) -> None:
    tools = Tools(tmp_path)
    blocks = tools.put(range(8))
    tools.bench.store.close()
    if not indexed:
        for path in (tmp_path / "local").glob("index.sqlite*"):
            path.unlink()
    paths = [spoil_file(tools, spoil, tier, blocks[1].key) for tier in ("ram", "local")]
    again = Tools(tmp_path)
    local = again.bench.state.levels[1]
    assert again.bench.in_tier(0) == again.bench.in_tier(1) == {blocks[0].key}
    assert all(path.exists() for path in paths)
    on_disk = sum(p.lstat().st_blocks * 512 for p in (tmp_path / "local").rglob("*"))
    assert local.physical_bytes >= on_disk  # it takes room
    again.bench.store.close()


@spoilt
def test_every_way_to_open_it_is_refused(tmp_path: Path, spoil: Spoil) -> None:
    tools = Tools(tmp_path)
    (block,) = tools.put(range(4))
    tier = tools.bench.tiers[1][0]
    spoil_file(tools, spoil, "local", block.key)
    with pytest.raises(NotOurs), tier.open(NAMESPACE, block.key):
        pass
    with pytest.raises(NotOurs), tier.peek(NAMESPACE, block.key):
        pass
    assert not tier.exists(NAMESPACE, block.key)
    tier.remove(NAMESPACE, block.key)
    assert tools.file("local", block.key).exists()


@pytest.mark.parametrize("part", ["v1", "namespace", "shard"])
@pytest.mark.parametrize("spoil", [foreign_owner, lambda path: path.chmod(0o770)])
def test_nothing_below_a_directory_of_others_is_used(
    tmp_path: Path, part: str, spoil: Spoil
) -> None:
    tools = Tools(tmp_path)
    (block,) = tools.put(range(4))
    path = tools.file("local", block.key)
    directory = {"v1": path.parents[2], "namespace": path.parents[1], "shard": path.parent}[part]
    spoil(directory)
    tier = tools.bench.tiers[1][0]
    with pytest.raises(NotOurs), tier.open(NAMESPACE, block.key):
        pass
    if part != "v1":  # else the tier is not opened at all
        assert list(tier.scan()) == []
    assert path.exists()


@spoilt
def test_on_a_shared_directory_too(tmp_path: Path, spoil: Spoil) -> None:
    tools = Tools(tmp_path)
    blocks = tools.put(range(8))
    tools.bench.store.close()
    path = spoil_file(tools, spoil, "local", blocks[0].key)
    tier = SharedFsTier(tmp_path / "local")
    assert [stored.key for stored in tier.scan()] == [blocks[1].key]
    assert tier.foreign_bytes >= path.lstat().st_blocks * 512
    assert tier.refused_files == 1


@spoilt
def test_tools_call_it_foreign_and_leave_it(tools: Tools, spoil: Spoil) -> None:
    blocks = tools.put(range(8))
    path = spoil_file(tools, spoil, "local", blocks[1].key)
    bad = path.with_name(path.name + ".bad")
    bad.write_bytes(b"x")
    spoil(bad)
    found = [
        f for step in verify(tools.bench.state, repair=True, alone=True) for f in step.findings
    ]
    assert {(f.what, f.repaired) for f in found} == {("foreign", False)}
    tools.admin.collect(older_than_seconds=0, models=None, dry_run=False)
    assert path.exists()
    assert bad.exists()


def test_a_block_stored_anew_takes_its_place(tmp_path: Path) -> None:
    tier = FsTier(TierKind.LOCAL, tmp_path / "local")
    (block,) = samples.sequence(samples.namespace(layers=1), range(4))
    path = path_of(tier, block.key)
    for usable in (False, True):
        temp = tier.create(NAMESPACE, block.key, len(block.data))
        temp.write_at(0, block.data)
        tier.publish(temp)
        if not usable:
            all_may_write(path)
        assert tier.exists(NAMESPACE, block.key) is usable
    tier.close()
