"""The store's tools over real directories: list, remove, verify, collect."""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from measure.store import samples
from ollama_tiering.errors import UsageError
from ollama_tiering.store.block.key import BlockKey
from ollama_tiering.store.errors import AmbiguousId, UnknownId
from ollama_tiering.store.tiers.contract import TierKind
from ollama_tiering.store.tiers.names import INDEX_NAME
from ollama_tiering.store.tools.admin import Administration
from ollama_tiering.store.values import Selection
from tests.unit.store.administration import DAY, OTHER, Tools, collect
from tests.unit.store.support import BLOCK_TOKENS, FILE_BYTES, NAMESPACE, NS, keys_of


@pytest.fixture
def tools(tmp_path: Path) -> Iterator[Tools]:
    made = Tools(tmp_path)
    yield made
    made.bench.store.close()


# --- list ---------------------------------------------------------------------------------------


def test_a_chain_is_a_leaf_with_what_leads_to_it(tools: Tools) -> None:
    short, long = tools.put([*range(8), 50]), tools.put([*range(8), 60, 61, 62, 63, 64])
    listing = tools.admin.listing()
    first, second = listing.chains
    assert (first.key, first.tokens, first.blocks, first.own_blocks) == (short[-1].key, 9, 3, 1)
    assert (second.key, second.tokens, second.blocks, second.own_blocks) == (long[-1].key, 13, 4, 2)
    assert first.file_bytes == 3 * FILE_BYTES
    assert first.own_bytes == FILE_BYTES
    assert [(u.tier, u.blocks) for u in second.tiers] == [(TierKind.RAM, 4), (TierKind.LOCAL, 4)]
    assert first.complete
    assert not first.pinned
    assert listing.stored == listing.selected
    assert (listing.stored.chains, listing.stored.blocks) == (2, 5)
    assert [use.stored_bytes for use in listing.stored.tiers] == [5 * FILE_BYTES] * 2
    assert dict(listing.descriptions[NAMESPACE])["model"] == "sample"


def test_hits_and_uses_are_counted_and_survive_a_restart(tmp_path: Path) -> None:
    tools = Tools(tmp_path)
    tools.put(range(8))
    for _ in range(3):
        tools.bench.rows(range(8))
        tools.bench.tick(10)
    (line,) = tools.chains()
    assert line.hits == 3
    used, created = line.last_use, line.created
    tools.bench.store.close()
    tools = Tools(tmp_path)
    (line,) = tools.chains()
    assert (line.hits, line.last_use, line.created) == (3, used, created)
    tools.bench.store.close()


def test_what_is_selected(tools: Tools) -> None:
    old = tools.put(range(12))
    tools.bench.tick(DAY)
    new = tools.put([77])
    other = tools.put_other(range(6))
    tools.admin.pin(new[-1].key.hex())

    def selected(**conditions: Any) -> set[BlockKey]:
        return {line.key for line in tools.chains(**conditions)}

    everything = {old[-1].key, new[-1].key, other[-1].key}
    assert selected() == everything
    assert selected(model="SAMPLE") == {old[-1].key, new[-1].key}
    assert selected(model="abab") == selected(model=OTHER.digest().hex()[:8]) == {other[-1].key}
    assert selected(model="none") == set()
    assert selected(older_than_seconds=DAY) == {old[-1].key}
    assert selected(min_tokens=6) == {old[-1].key, other[-1].key}
    assert selected(min_bytes=3 * FILE_BYTES) == {old[-1].key}
    assert selected(tier=TierKind.LOCAL) == everything
    assert selected(tier=TierKind.REMOTE) == set()
    assert selected(pinned=True) == {new[-1].key}
    assert selected(ids=(old[-1].key.hex()[:12],)) == {old[-1].key}


def test_single_blocks_know_how_long_their_prefix_is(tools: Tools) -> None:
    blocks = tools.put(range(10))
    listing = tools.admin.listing(Selection(ids=(blocks[-1].key.hex(),)), blocks=True)
    assert [line.key for line in listing.blocks] == [block.key for block in blocks]
    assert [line.tokens for line in listing.blocks] == [4, 8, 10]
    assert [line.rows for line in listing.blocks] == [4, 4, 2]
    assert [line.children for line in listing.blocks] == [1, 1, 0]
    assert listing.selected.blocks == 3


def test_many_chains_on_one_prompt_are_counted_once_each(tools: Tools) -> None:
    for number in range(10):
        tools.put([*range(8), 100 + number])
    listing = tools.admin.listing()
    assert len(listing.chains) == 10
    assert {line.blocks for line in listing.chains} == {3}
    assert listing.selected.blocks == 12


def test_ids(tools: Tools) -> None:
    for number in range(40):
        tools.put([number])
    keys = sorted(line.key.hex() for line in tools.chains())
    digits = tools.admin.listing().id_digits
    assert len({key[:digits] for key in keys}) == 40
    lister = tools.admin._lister()
    for key in keys:
        assert lister.resolve(key[:digits].upper()).key.hex() == key
    with pytest.raises(UnknownId):
        lister.resolve("0" * 64)
    for malformed in ("", "abc", "xyz1", "../..", "0" * 65, "ab cd"):
        with pytest.raises(UsageError):
            lister.resolve(malformed)


def test_an_ambiguous_id_names_the_candidates(
    tools: Tools, monkeypatch: pytest.MonkeyPatch
) -> None:
    tools.put(range(12))
    lister = tools.admin._lister()
    a, b, c = lister.records
    a.key = BlockKey(b"\x12\x34" + a.key[2:])
    b.key = BlockKey(b"\x12\x35" + b.key[2:])
    c.key = BlockKey(b"\x12\x34" + c.key[2:])
    with pytest.raises(AmbiguousId) as caught:
        lister.resolve("1234")
    assert a.key.hex()[:16] in caught.value.message
    assert c.key.hex()[:16] in caught.value.message
    assert b.key.hex()[:16] not in caught.value.message
    assert lister.resolve("1235") is b
    assert lister.resolve(a.key.hex()[:20]) is a


# --- remove -------------------------------------------------------------------------------------


def test_what_another_conversation_needs_stays(tools: Tools) -> None:
    one, two = tools.put([*range(8), 50]), tools.put([*range(8), 60, 61])
    done = tools.admin.remove(Selection(ids=(one[-1].key.hex(),)), dry_run=False)
    assert (done.chains, done.blocks) == (1, 1)
    assert done.stored_bytes == 2 * FILE_BYTES  # in both tiers
    assert done.kept == {"needed by another chain": 2}
    assert tools.bench.rows([*range(8), 60, 61]) == 10
    assert not tools.file("local", one[-1].key).exists()
    assert all(tools.file("local", block.key).exists() for block in two)


def test_two_chains_together_take_what_only_they_share(tools: Tools) -> None:
    tools.put([*range(8), 50])
    tools.put([*range(8), 60])
    other = tools.put_other([1])
    done = tools.admin.remove(Selection(model="sample"), dry_run=False)
    assert (done.chains, done.blocks, done.kept) == (2, 4, {})
    assert [line.key for line in tools.chains()] == [other[-1].key]


def test_a_dry_run_says_the_same_and_changes_nothing(tools: Tools) -> None:
    tools.put([*range(8), 50])
    tools.put([*range(8), 60])
    pinned = tools.put([90])
    tools.admin.pin(pinned[-1].key.hex())
    before = tools.files()
    planned = tools.admin.remove(Selection(), dry_run=True)
    assert tools.files() == before
    assert planned == tools.admin.remove(Selection(), dry_run=False)
    assert (planned.chains, planned.blocks, planned.kept) == (2, 4, {"pinned": 1})


def test_what_is_leased_or_pinned_stays_with_what_leads_to_it(
    tools: Tools, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("ollama_tiering.store.tools.admin.REMOVE_WAIT_SECONDS", 0.0)
    leased, pinned, loose = tools.put(range(8)), tools.put(range(20, 32)), tools.put([50])
    lease = tools.bench.lease(leased[:1])
    tools.admin.pin(pinned[1].key.hex())
    done = tools.admin.remove(Selection(), dry_run=False)
    assert done.kept == {"in use": 1, "pinned": 2}
    assert done.blocks == 3
    left = {line.key for line in tools.admin.listing(blocks=True).blocks}
    assert left == keys_of([leased[0], *pinned[:2]])
    assert loose[0].key not in left
    tools.bench.store.release(lease)
    tools.admin.unpin(pinned[1].key.hex())
    assert tools.admin.remove(Selection(), dry_run=False).blocks == 3
    assert tools.bench.store.report().tiers[1].blocks == 0


def test_a_block_inside_a_chain_takes_nothing_from_it(tools: Tools) -> None:
    blocks = tools.put(range(12))
    done = tools.admin.remove(Selection(ids=(blocks[1].key.hex(),)), dry_run=False)
    assert (done.chains, done.blocks, done.kept) == (0, 0, {"needed by another chain": 2})


# --- verify -------------------------------------------------------------------------------------


def test_a_sound_store_has_no_findings_and_is_read_whole(tools: Tools) -> None:
    tools.put(range(20))
    steps = list(tools.admin.verify(repair=False))
    assert steps[-1].done_blocks == steps[-1].total_blocks == 10
    assert steps[-1].done_bytes == 10 * FILE_BYTES
    assert not any(step.findings for step in steps)


@pytest.mark.parametrize("offset", [3, 9, 20, 40, 4096, 4100])
def test_a_flipped_bit_is_found_and_repair_touches_only_that_file(
    tools: Tools, offset: int
) -> None:
    bad, *good = tools.put(range(16))
    tools.flip(tools.file("local", bad.key), offset)
    before = tools.files()
    (finding,) = tools.verify()
    assert (finding.tier, finding.repaired) == (TierKind.LOCAL, False)
    assert finding.what == "damaged"
    assert finding.path.endswith(f"{bad.key.hex()}.kvb")
    assert tools.files() == before
    (finding,) = tools.verify(repair=True)
    assert finding.repaired
    after = tools.files()
    name = str(tools.file("local", bad.key).relative_to(tools.root))
    assert after.pop(name + ".bad") == before.pop(name)
    assert after == before
    assert [f.what for f in tools.verify()] == ["quarantined"]
    assert tools.bench.rows(range(16)) == 16  # the copy in RAM is good
    assert tools.bench.store.report().tiers[1].blocks == len(good)


def test_a_file_of_another_block_is_damage(tools: Tools) -> None:
    first, second = tools.put([*range(4)]), tools.put([9])
    target = tools.file("local", first[0].key)
    target.unlink()
    target.write_bytes(tools.file("local", second[0].key).read_bytes())
    (finding,) = tools.verify()
    assert finding.what == "damaged"
    assert "another block" in finding.detail


def test_a_truncated_file_and_a_foreign_one(tools: Tools) -> None:
    (block,) = tools.put([1])
    path = tools.file("local", block.key)
    path.chmod(0o600)
    os.truncate(path, 5000)
    stranger = path.with_name("notes.txt")
    stranger.write_text("mine")
    found = {finding.what for finding in tools.verify(repair=True)}
    assert found == {"damaged", "foreign"}
    assert stranger.read_text() == "mine"


def test_a_read_error_is_no_damage_and_deletes_nothing(
    tools: Tools, monkeypatch: pytest.MonkeyPatch
) -> None:
    tools.put([1])

    def fail(*args: object) -> None:
        raise OSError(5, "Input/output error")

    monkeypatch.setattr("ollama_tiering.store.tiers.checked.verify_payload", fail)
    before = tools.files()
    assert {finding.what for finding in tools.verify(repair=True)} == {"unreadable"}
    assert tools.files() == before


def test_repair_removes_leftovers_and_makes_the_index_anew(tools: Tools) -> None:
    blocks = tools.put(range(8))
    beside = tools.file("local", blocks[0].key)
    leftover = beside.with_name(f"{blocks[0].key.hex()}.deadbeef.tmp")
    leftover.write_bytes(b"half")
    assert [(f.what, f.repaired) for f in tools.verify()] == [("temporary", False)]
    assert leftover.exists()
    assert [(f.what, f.repaired) for f in tools.verify(repair=True)] == [("temporary", True)]
    assert not leftover.exists()
    index = tools.root / "local" / INDEX_NAME
    before = tools.root / "index-before"
    before.hardlink_to(index)
    tools.bench.store.flush_index()
    assert not index.samefile(before)
    assert len(list(tools.bench.store._keeper._index.load())) == 4  # type: ignore[union-attr]


def test_while_others_write_a_young_temporary_file_is_no_leftover(tools: Tools) -> None:
    shared = Administration(tools.bench.store, alone=False)
    (block,) = samples.sequence(NS, [1])
    tools.bench.reserve([block])
    assert [f for step in shared.verify(repair=True) for f in step.findings] == []
    tools.bench.now = 4e9  # far in the future, and still being written
    assert [f for step in shared.verify(repair=True) for f in step.findings] == []
    tools.bench.store.close_session(tools.bench.session)
    assert tools.bench.store.report().tiers[0].reserved_bytes == 0


# --- collect ------------------------------------------------------------------------------------


def test_a_sound_store_has_no_waste(tools: Tools) -> None:
    tools.put(range(12))
    assert collect(tools) == {}


def test_each_kind_of_waste_is_found_and_removed(tools: Tools) -> None:
    kept = tools.put(range(4))
    broken = tools.put(range(100, 112))
    for tier in ("ram", "local"):
        tools.flip(tools.file(tier, broken[0].key), 4100)
        assert tools.verify(repair=True)
    gone = tools.put_other([5])
    leftover = tools.file("ram", kept[0].key).with_name(f"{kept[0].key.hex()}.00.tmp")
    leftover.write_bytes(bytes(4096))
    before = tools.files()
    models = frozenset({"sha256-" + "cd" * 32})
    expected = {
        "model gone": (1, 2 * FILE_BYTES),
        "unreachable": (2, 4 * FILE_BYTES),
        "quarantined": (2, 2 * FILE_BYTES),
        "temporary": (1, 4096),
    }
    assert collect(tools, models=models, dry_run=True) == expected
    assert tools.files() == before
    assert collect(tools, models=models) == expected
    assert collect(tools, models=models) == {}
    assert {line.key for line in tools.chains()} == keys_of(kept)
    assert not tools.file("local", gone[0].key, OTHER.digest()).exists()


def test_a_model_that_is_there_or_is_no_file_is_not_gone(tools: Tools) -> None:
    tools.put([1])
    tools.put_other([2])
    assert collect(tools, models=frozenset({OTHER.model})) == {}
    assert set(collect(tools, models=frozenset())) == {"model gone"}
    assert len(tools.chains()) == 1


def test_expired_is_what_was_not_used_for_so_long_and_is_not_pinned(tools: Tools) -> None:
    tools.put(range(8))
    pinned = tools.put([90])
    tools.admin.pin(pinned[0].key.hex())
    tools.bench.tick(2 * DAY)
    fresh = tools.put([91])
    (expired, *_) = tools.admin.collect(older_than_seconds=DAY, models=None, dry_run=False)
    assert (expired.kind, expired.files, expired.kept) == ("expired", 2, {"pinned": 1})
    assert {line.key for line in tools.chains()} == {pinned[0].key, fresh[0].key}


def test_a_child_of_what_is_just_being_written_is_reachable(tools: Tools) -> None:
    first, second = samples.sequence(NS, range(8))
    (reserved,) = tools.bench.reserve([first])
    with tools.bench.store.open_session(NAMESPACE, NS.fields(), BLOCK_TOKENS) as other:
        assert other.put_inline(second.key, second.data, last=True)
    assert collect(tools) == {}
    tools.bench.fill(reserved, first.data)
    assert tools.bench.session.commit([reserved.reservation_id])[0].stored
    assert tools.bench.rows(range(8)) == 8


def test_while_a_tier_is_still_surveyed_nothing_counts_as_unreachable(tools: Tools) -> None:
    broken = tools.put(range(8))
    for tier in ("ram", "local"):
        tools.flip(tools.file(tier, broken[0].key), 4100)
        tools.verify(repair=True)
    tools.bench.state.levels[1].surveyed = False
    assert set(collect(tools)) == {"quarantined"}
    tools.bench.state.levels[1].surveyed = True
    assert set(collect(tools)) == {"unreachable"}


def put_by(tools: Tools, engine: str, tokens: Any) -> set[BlockKey]:
    """Keys of blocks that this engine stored."""
    described = dataclasses.replace(OTHER, engine=engine, extra="content=sha256")
    with tools.bench.store.open_session(
        described.digest(), described.fields(), BLOCK_TOKENS
    ) as session:
        blocks = samples.sequence(described, tokens)
        for block in blocks:
            assert session.put_inline(block.key, block.data, last=True)
    tools.bench.store.run_pending()
    return keys_of(blocks)


def test_what_other_builds_of_the_engine_stored_goes(tools: Tools) -> None:
    reference = keys_of(tools.put_other(range(4)))  # of an engine that has no builds
    here = put_by(tools, "ollama-go/0.16.3+aaaa", range(4))
    gone = put_by(tools, "ollama-go/0.16.3+bbbb", range(8))
    early = put_by(tools, "ollama-go/0.16.3", range(4))  # before builds had names
    here |= put_by(tools, "ollama-go/0.16.3+exe-cccc", range(4))  # nobody knows where that one is
    builds = frozenset({"aaaa"})
    assert collect(tools) == {}
    expected = {"other build": (3, 2 * 3 * FILE_BYTES)}  # in RAM and on the disk
    assert collect(tools, builds=builds, dry_run=True) == expected
    assert {block.key for block in tools.bench.state.tree} == reference | here | gone | early
    assert collect(tools, builds=builds) == expected
    assert {block.key for block in tools.bench.state.tree} == reference | here


def test_the_blocks_of_each_namespace_are_counted(tools: Tools) -> None:
    tools.put_other(range(4))
    by = put_by(tools, "ollama-go/0.16.3+aaaa", range(12))
    counts = tools.bench.store.report().namespaces
    assert [blocks for _, blocks in counts] == [len(by), 1]
    tools.admin.remove(Selection(), dry_run=False)
    assert tools.bench.store.report().namespaces == []
