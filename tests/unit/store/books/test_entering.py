"""A block enters the books only while the one before it is there, whoever was quicker."""

from __future__ import annotations

from typing import Any

import pytest

from measure.store import samples
from ollama_tiering.store.block.key import BlockKey, NamespaceId
from ollama_tiering.store.tiers.contract import TempBlock
from ollama_tiering.store.tiers.memory import MemoryTier
from ollama_tiering.store.upkeep.damage import check
from tests.unit.store.support import BLOCK_TOKENS, NAMESPACE, Bench

TOKENS = range(3 * BLOCK_TOKENS)


def quarantined(bench: Bench, parent: samples.SampleBlock) -> None:
    bench.damage(0, parent.key)
    assert check(bench.state, NAMESPACE, parent.key)


def given_up(bench: Bench, parent: samples.SampleBlock) -> None:
    """It was not filled in time, by another writer."""
    bench.store.close_session(bench.writer)  # type: ignore[attr-defined]


@pytest.mark.parametrize("parent_is", ["stored", "being written"])
def test_a_child_whose_parent_goes_while_it_is_named_does_not_enter(
    monkeypatch: pytest.MonkeyPatch, parent_is: str
) -> None:
    bench = Bench(local=None)
    parent, child, _ = samples.sequence(samples.namespace(layers=1), TOKENS)
    if parent_is == "stored":
        assert all(result.stored for result in bench.try_put([parent]))
        go = quarantined
    else:
        fields = samples.namespace(layers=1).fields()
        writer = bench.store.open_session(NAMESPACE, fields, BLOCK_TOKENS)
        bench.writer = writer  # type: ignore[attr-defined]
        assert writer.reserve([parent.offer])[0].reservation_id
        go = given_up
    tier = bench.tiers[0][0]
    assert isinstance(tier, MemoryTier)
    (reserved,) = bench.reserve([child])
    bench.fill(reserved, child.data)
    publish = tier.publish

    def while_it_is_named(temp: TempBlock, **options: Any) -> int:
        stored_bytes = publish(temp, **options)
        go(bench, parent)
        return stored_bytes

    monkeypatch.setattr(tier, "publish", while_it_is_named)
    (result,) = bench.session.commit([reserved.reservation_id])
    assert not result.stored
    assert "the block before it was not stored" in result.reason
    assert bench.state.tree.get(child.key) is None
    assert (NAMESPACE, child.key) not in tier.blocks
    assert not bench.state.writing
    assert bench.state.levels[0].lru.reserved_bytes == 0
    # Nothing is left of it: the whole chain can be stored again.
    monkeypatch.setattr(tier, "publish", publish)
    bench.put(TOKENS)
    assert bench.rows(TOKENS) == len(TOKENS)


def test_a_parent_that_goes_before_is_seen_before_the_file_is_named(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    bench = Bench(local=None)
    parent, child, _ = samples.sequence(samples.namespace(layers=1), TOKENS)
    bench.try_put([parent])
    (reserved,) = bench.reserve([child])
    bench.fill(reserved, child.data)
    quarantined(bench, parent)
    named: list[tuple[NamespaceId, BlockKey]] = []
    tier = bench.tiers[0][0]
    monkeypatch.setattr(tier, "publish", lambda temp, **_: named.append((temp.namespace, temp.key)))
    (result,) = bench.session.commit([reserved.reservation_id])
    assert (result.stored, result.reason) == (False, "the block before it is not stored")
    assert named == []
