from __future__ import annotations

import pytest

from ollama_tiering.store.block.key import BlockKey
from ollama_tiering.store.books.leases import LeaseTable
from ollama_tiering.store.errors import NoRoom

KEYS = [BlockKey(bytes([number]) * 32) for number in range(10)]


def test_leased_blocks_are_bounded_whoever_leases_them(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("ollama_tiering.store.books.leases.MAX_LEASED_BLOCKS", 25)
    table = LeaseTable(clock=lambda: 0.0)
    first = table.open(KEYS, 60.0)
    table.check_room(15)
    with pytest.raises(NoRoom, match="1 lease of 10 blocks is open"):
        table.check_room(16)
    table.open(KEYS, 30.0)
    assert table.expire(30.0) == KEYS
    assert list(table.close(first)) == KEYS
    assert not table.close(first)
    table.check_room(25)


def test_open_leases_are_bounded_even_if_empty(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("ollama_tiering.store.books.leases.MAX_LEASES", 2)
    table = LeaseTable(clock=lambda: 0.0)
    ids = [table.open([], 60.0) for _ in range(2)]
    with pytest.raises(NoRoom):
        table.check_room(0)
    table.close(ids[0])
    table.check_room(0)


def test_a_lease_that_is_renewed_lasts_longer_and_never_shorter() -> None:
    table = LeaseTable(clock=lambda: 0.0)
    lease = table.open(KEYS, 60.0)
    assert table.renew(lease, 100.0)
    assert table.renew(lease, 90.0)
    assert table.expire(99.0) == []
    assert table.expire(100.0) == KEYS
    assert not table.renew(lease, 200.0)
    assert table.expire(200.0) == []
