"""A lease is given and ended in pieces: the lock is free in between, nothing stays held."""

from __future__ import annotations

import pytest

from ollama_tiering.store.block.key import BlockKey
from ollama_tiering.store.errors import NoRoom
from ollama_tiering.store.serving import leasing
from ollama_tiering.store.serving.leasing import Leaser
from tests.unit.store.chains import MOST_PER_HOLD, Holds, in_books
from tests.unit.store.support import NAMESPACE, Bench

MANY = 10_000


def no_copy(*_: object) -> bool:
    return False


def leaser(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> Leaser:
    """Whose blocks are all there: no file is looked at."""
    monkeypatch.setattr(type(bench.state.levels[0].tier), "exists", lambda *_: True)

    return Leaser(bench.state, no_copy, lease_seconds=60.0, deadline_seconds=1.0)


def held(bench: Bench, keys: list[BlockKey]) -> int:
    return sum(map(bench.state.held, keys))


def test_the_lock_is_held_for_a_bounded_number_of_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    bench = Bench(ram=MANY, local=MANY)
    keys, _ = in_books(bench, MANY)
    leases = leaser(bench, monkeypatch)
    watched = Holds(bench, monkeypatch)
    for name in ("hold", "let_go", "touch"):
        watched.count(bench.state, name)
    given = leases.begin(NAMESPACE, keys)
    assert len(given.blocks) == MANY
    assert sum(watched.holds) == 2 * MANY  # held, touched
    leases.release(given.lease_id)
    assert sum(watched.holds) == 3 * MANY
    assert max(watched.holds) <= MOST_PER_HOLD
    assert held(bench, keys) == 0


@pytest.mark.parametrize("piece", [1, 2, 3, 7, 8, 512])
@pytest.mark.parametrize("there", [0, 1, 6, 7])
def test_the_lease_is_the_same_whatever_the_pieces(
    piece: int, there: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(leasing, "PIECE_BLOCKS", piece)
    bench = Bench(ram=16, local=None)
    keys, _ = in_books(bench, 7)
    asked = [*keys[:there], *([] if there == 7 else [BlockKey(b"?" * len(keys[0]))]), *keys[there:]]
    leases = leaser(bench, monkeypatch)
    given = leases.begin(NAMESPACE, asked)
    assert [block.key for block in given.blocks] == keys[:there]  # type: ignore[union-attr]
    assert held(bench, keys) == there
    assert bench.state.counters.misses.get("evicted", 0) == (there < 7)
    order = [key for key in bench.state.levels[0].lru if key in keys[:there]]
    assert order == keys[:there][::-1]  # the leaf is the first to be evicted
    leases.release(given.lease_id)
    assert held(bench, keys) == 0


def test_one_for_which_there_is_no_room_leaves_nothing_held(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(leasing, "PIECE_BLOCKS", 3)
    monkeypatch.setattr("ollama_tiering.store.books.leases.MAX_LEASED_BLOCKS", 6)
    bench = Bench(ram=16, local=None)
    keys, _ = in_books(bench, 7)
    leases = leaser(bench, monkeypatch)
    with pytest.raises(NoRoom):
        leases.begin(NAMESPACE, keys)
    assert (len(bench.state.leases), held(bench, keys)) == (0, 0)
    assert len(leases.begin(NAMESPACE, keys[:6]).blocks) == 6  # and none counted as leased


def test_one_that_takes_longer_than_a_lease_lasts_ends_there(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Between two pieces somebody else finds that its time is over."""
    monkeypatch.setattr(leasing, "PIECE_BLOCKS", 3)
    bench = Bench(ram=16, local=None)
    keys, _ = in_books(bench, 7)
    leases = leaser(bench, monkeypatch)
    extend = bench.state.leases.extend
    pieces = []

    def late(lease_id: int, held: list[BlockKey]) -> bool:
        pieces.append(len(held))
        if len(pieces) == 2:
            bench.state.end_use(bench.state.leases.close(lease_id))
        return extend(lease_id, held)

    monkeypatch.setattr(bench.state.leases, "extend", late)
    given = leases.begin(NAMESPACE, keys)
    assert [block.key for block in given.blocks] == keys[:3]  # type: ignore[union-attr]
    assert (pieces, held(bench, keys)) == ([3, 3], 0)
    leases.release(given.lease_id)
    assert held(bench, keys) == 0
