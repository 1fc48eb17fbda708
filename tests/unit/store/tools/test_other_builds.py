"""What other builds stored in the shared directory stays: another host may have that build."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import pytest

from measure.store import samples
from ollama_tiering.config import MIB
from ollama_tiering.store.books.shared_books import SharedBooks
from ollama_tiering.store.tiers.contract import TierKind
from ollama_tiering.store.tiers.directory import FsTier
from ollama_tiering.store.tools.admin import Administration
from ollama_tiering.store.values import Waste
from tests.unit.store.support import BLOCK_TOKENS, Bench, keys_of

GONE = dataclasses.replace(
    samples.namespace(layers=1), engine="ollama-go/0.16.3+gone", extra="content=sha256"
)
HERE = frozenset({"here"})


def other_build(waste: list[Waste]) -> Waste:
    return next(one for one in waste if one.kind == "other build")


@pytest.fixture
def bench(tmp_path: Path) -> Bench:
    """A local tier and a directory that others use, as the tools open them: not as a shared one."""
    tiers = [
        (FsTier(TierKind.LOCAL, tmp_path / "local"), 64 * MIB),
        (FsTier(TierKind.REMOTE, tmp_path / "remote"), 64 * MIB),
    ]
    return Bench(tiers=tiers)


def put(bench: Bench, tokens: range, *, remote: bool) -> list[samples.SampleBlock]:
    with bench.store.open_session(GONE.digest(), GONE.fields(), BLOCK_TOKENS) as session:
        blocks = samples.sequence(GONE, tokens)
        for block in blocks:
            assert session.put_inline(block.key, block.data, last=True)
    if remote:
        level = bench.state.levels[1]
        for block in blocks:
            record = bench.state.tree.get(block.key)
            assert record is not None
            bench.state.add_copy(record, level, len(block.data))
    return blocks


def test_what_lies_in_the_shared_directory_stays_and_so_does_what_comes_before_it(
    bench: Bench,
) -> None:
    shared = put(bench, range(2 * BLOCK_TOKENS), remote=True)
    grown = put(bench, range(4 * BLOCK_TOKENS), remote=False)  # begins with those
    admin = Administration(bench.store, alone=True)
    planned = other_build(
        admin.collect(older_than_seconds=0, models=None, dry_run=True, builds=HERE)
    )
    done = other_build(admin.collect(older_than_seconds=0, models=None, dry_run=False, builds=HERE))
    assert planned.files == done.files == 2
    assert done.kept == {"in the shared directory": 2}
    assert {record.key for record in bench.state.tree} == keys_of(shared)
    assert not keys_of(grown[2:]) & {record.key for record in bench.state.tree}


def test_nothing_is_buried_in_a_directory_that_others_use(bench: Bench) -> None:
    """A tombstone would have another host's copy removed."""
    put(bench, range(2 * BLOCK_TOKENS), remote=False)
    bench.state.levels[1].shared = SharedBooks()
    admin = Administration(bench.store, alone=True)
    assert (
        other_build(
            admin.collect(older_than_seconds=0, models=None, dry_run=False, builds=HERE)
        ).files
        == 2
    )
    assert not bench.store.graveyard.graves.tombstones
