"""A look-up goes in pieces: the lock is free in between, and the answer is that of one piece."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

import pytest

from ollama_tiering.store.block.key import BlockKey
from ollama_tiering.store.books.report import MatchedBlock
from ollama_tiering.store.serving import lookup
from tests.unit.store.chains import MANY, MOST_PER_HOLD, Holds, in_books
from tests.unit.store.support import BLOCK_TOKENS, NAMESPACE, Bench


def watched_look_up(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> Holds:
    holds = Holds(bench, monkeypatch)
    holds.count(bench.state.tree, "run", results=True)
    holds.count(bench.state, "touch")
    holds.count(bench.state.admission, "used")
    return holds


def test_the_lock_is_held_for_a_bounded_number_of_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    bench = Bench(ram=MANY, local=MANY)
    keys, tokens = in_books(bench, MANY)
    watched = watched_look_up(bench, monkeypatch)
    found = bench.store.match(NAMESPACE, keys, tokens, BLOCK_TOKENS)
    assert len(found) == MANY
    assert sum(watched.holds) == 3 * MANY  # found, touched, wanted on disk
    assert max(watched.holds) <= MOST_PER_HOLD


def test_a_short_look_up_takes_few_holds(monkeypatch: pytest.MonkeyPatch) -> None:
    bench = Bench(ram=100, local=100)
    keys, tokens = in_books(bench, 100)
    watched = watched_look_up(bench, monkeypatch)
    assert len(bench.store.match(NAMESPACE, keys, tokens, BLOCK_TOKENS)) == 100
    assert len(watched.holds) <= 4


@pytest.mark.parametrize("piece", [1, 2, 3, 7, 8, 512])
@pytest.mark.parametrize("asked", [0, 1, 6, 7])
def test_the_answer_is_the_same_whatever_the_pieces(
    piece: int, asked: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of a chain of 7 blocks, asked for whole, in part, and with a tail that matches in part."""
    monkeypatch.setattr(lookup, "PIECE_BLOCKS", piece)
    bench = Bench(ram=16, local=16)
    stored = bench.put(range(7 * BLOCK_TOKENS))
    wanted = [*range(asked * BLOCK_TOKENS + 3)]
    found = bench.match(wanted)
    rows = min(len(wanted), 7 * BLOCK_TOKENS)
    assert sum(block.rows for block in found) == rows
    assert [block.key for block in found] == [block.key for block in stored[: len(found)]]
    assert bench.state.counters.matched_tokens == rows
    assert bench.state.counters.asked_tokens == len(wanted)
    assert bench.state.counters.has_calls == 1
    assert [block.rows for block in found[:asked]] == [BLOCK_TOKENS] * asked


@pytest.mark.parametrize("piece", [1, 2, 3, 512])
def test_the_leaf_is_the_first_to_be_evicted(piece: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lookup, "PIECE_BLOCKS", piece)
    bench = Bench(ram=16, local=None)
    stored = bench.put(range(7 * BLOCK_TOKENS))
    bench.match(range(7 * BLOCK_TOKENS))
    order = [key for key in bench.state.levels[0].lru if key in {b.key for b in stored}]
    assert order == [block.key for block in reversed(stored)]


def evicted_from(bench: Bench, keys: Iterable[BlockKey]) -> None:
    """From the leaf on, as eviction does it."""
    with bench.state.lock:
        for key in reversed(list(keys)):
            assert bench.state.drop_copy(bench.state.levels[0], key)


def drained(pieces: Iterator[list[MatchedBlock]]) -> list[MatchedBlock]:
    return [block for piece in pieces for block in piece]


def test_a_chain_whose_later_part_is_evicted_meanwhile_ends_earlier(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(lookup, "PIECE_BLOCKS", 3)
    bench = Bench(ram=16, local=None)
    keys, tokens = in_books(bench, 10)
    pieces = bench.store.match_in_pieces(NAMESPACE, keys, tokens, BLOCK_TOKENS)
    first = next(pieces)
    evicted_from(bench, keys[4:])
    found = first + drained(pieces)
    assert [block.key for block in found] == keys[:4]
    assert bench.state.counters.matched_tokens == 4 * BLOCK_TOKENS


def test_what_is_evicted_before_it_is_marked_as_used_comes_to_nothing(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The answer names it, the lease is a miss: as if it had been evicted a moment later."""
    monkeypatch.setattr(lookup, "PIECE_BLOCKS", 3)
    bench = Bench(ram=16, local=None)
    keys, tokens = in_books(bench, 6)
    pieces = bench.store.match_in_pieces(NAMESPACE, keys, tokens, BLOCK_TOKENS)
    found = next(pieces) + next(pieces)
    assert len(found) == 6
    evicted_from(bench, keys[2:])
    assert drained(pieces) == []
    assert set(bench.state.levels[0].lru) == set(keys[:2])
    assert bench.state.tree.get(keys[5]) is None
    assert len(bench.store.match(NAMESPACE, keys, tokens, BLOCK_TOKENS)) == 2


def test_one_that_is_given_up_has_used_nothing() -> None:
    bench = Bench(ram=16, local=None)
    keys, tokens = in_books(bench, 6)
    pieces = bench.store.match_in_pieces(NAMESPACE, keys, tokens, BLOCK_TOKENS)
    next(pieces)
    pieces.close()  # type: ignore[attr-defined]
    assert bench.state.counters.has_calls == 0
    assert all(record.hits == 0 for record in bench.state.tree)


@pytest.mark.parametrize("piece", [1, 2, 512])
def test_a_match_ends_where_a_block_is_out_of_reach_whatever_the_pieces(
    piece: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(lookup, "PIECE_BLOCKS", piece)
    bench = Bench()
    blocks = bench.put(range(4 * BLOCK_TOKENS))
    bench.store.run_pending()
    with bench.state.lock:
        assert bench.state.drop_copy(bench.state.levels[0], blocks[1].key)
    monkeypatch.setattr(bench.state, "resting", lambda: [1])
    found = bench.match(range(4 * BLOCK_TOKENS))
    assert [block.key for block in found] == [blocks[0].key]
