"""Pins: what is pinned stays, through pressure, restart, a lost index; and within its share."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest

from ollama_tiering.store.block.key import BlockKey
from ollama_tiering.store.books.pins import Pin, PinTable
from ollama_tiering.store.errors import PinsFull, UnknownId
from ollama_tiering.store.tiers.contract import TierKind
from ollama_tiering.store.tiers.memory import MemoryTier
from ollama_tiering.store.tiers.names import INDEX_NAME, PINS_NAME
from ollama_tiering.store.upkeep.pin_file import file_of_pins, load_pins, save_pins
from ollama_tiering.system.directories import UnsafeDirectory
from tests.unit.store.pins import on_disk, pressure
from tests.unit.store.support import FILE_BYTES, NAMESPACE, Bench, keys_of


def test_a_pinned_chain_survives_pressure_and_an_unpinned_one_does_not() -> None:
    bench = Bench(ram=None, local=8)
    pinned, loose = bench.put(range(12)), bench.put(range(100, 108))
    bench.store.pins.pin(pinned[-1].key)
    pressure(bench)
    assert bench.in_tier(0) >= keys_of(pinned)
    assert not bench.in_tier(0) & keys_of(loose)
    assert bench.rows(range(12)) == 12
    assert bench.store.report().tiers[0].used_bytes <= 8 * FILE_BYTES


def test_pinning_a_block_inside_a_chain_keeps_what_leads_to_it_only() -> None:
    bench = Bench(ram=None, local=8)
    chain = bench.put(range(12))
    bench.store.pins.pin(chain[0].key)
    pressure(bench)
    assert bench.rows(range(12)) == 4


def test_in_ram_a_pinned_block_may_go_once_it_is_written_down() -> None:
    bench = Bench(ram=4, local=16)
    pinned = bench.put(range(8))
    bench.store.pins.pin(pinned[-1].key)
    pressure(bench, 8)
    assert bench.in_tier(1) >= keys_of(pinned)


def test_a_copy_in_a_shared_tier_is_not_enough() -> None:
    tiers: Any = [
        (MemoryTier(TierKind.LOCAL), 4 * FILE_BYTES),
        (MemoryTier(TierKind.REMOTE), 64 * FILE_BYTES),
    ]
    bench = Bench(tiers=tiers)
    pinned = bench.put(range(8))
    bench.store.pins.pin(pinned[-1].key)
    pressure(bench)
    assert bench.in_tier(0) >= keys_of(pinned)


def test_pins_survive_a_restart(tmp_path: Path) -> None:
    bench = on_disk(tmp_path)
    pinned, loose = bench.put(range(12)), bench.put(range(100, 108))
    bench.store.pins.pin(pinned[-1].key)
    bench.store.close()
    bench = on_disk(tmp_path)
    pressure(bench, 120)
    assert bench.in_tier(0) >= keys_of(pinned)
    assert not bench.in_tier(0) & keys_of(loose)
    bench.store.close()


def test_pins_survive_a_deleted_index(tmp_path: Path) -> None:
    bench = on_disk(tmp_path, blocks=4096, index=True)
    pinned = bench.put(range(12))
    bench.store.pins.pin(pinned[-1].key)
    bench.store.close()
    names = list((tmp_path / "local").glob(INDEX_NAME + "*"))
    assert names
    for name in names:
        name.unlink()
    bench = on_disk(tmp_path, blocks=4096, index=True)
    assert all(bench.state.pins.keeps(block.key) for block in pinned)
    assert bench.store.pins.pinned_bytes() == 3 * FILE_BYTES
    bench.store.close()


def test_unpinned_is_unpinned_after_a_restart_too(tmp_path: Path) -> None:
    bench = on_disk(tmp_path)
    pinned = bench.put(range(12))
    bench.store.pins.pin(pinned[-1].key)
    assert bench.store.pins.unpin(pinned[-1].key)
    assert not bench.store.pins.unpin(pinned[-1].key)
    bench.store.close()
    bench = on_disk(tmp_path)
    pressure(bench, 120)
    assert not bench.in_tier(0) & keys_of(pinned)
    bench.store.close()


def test_a_shared_prefix_stays_pinned_until_the_last_pin_goes() -> None:
    bench = Bench(ram=None, local=16)
    one, two = bench.put([*range(4), 7, 7]), bench.put([*range(4), 8, 8])
    bench.store.pins.pin(one[-1].key)
    bench.store.pins.pin(two[-1].key)
    bench.store.pins.unpin(one[-1].key)
    pressure(bench)
    assert bench.rows([*range(4), 8, 8]) == 6
    assert bench.rows([*range(4), 7, 7]) == 4


def test_more_than_the_share_is_refused_with_a_cure() -> None:
    bench = Bench(ram=None, local=8, pin_share=0.5)
    fits, more = bench.put(range(12)), bench.put(range(100, 108))
    bench.store.pins.pin(fits[-1].key)
    with pytest.raises(PinsFull) as caught:
        bench.store.pins.pin(more[-1].key)
    assert "unpin" in (caught.value.hint or "")
    bench.store.pins.pin(more[0].key)  # 4 of 8 blocks: exactly the share
    assert bench.store.pins.pinned_bytes() == 4 * FILE_BYTES == bench.store.pins.limit_bytes


def test_a_lowered_budget_holds_and_older_pins_stay_in_force(tmp_path: Path) -> None:
    bench = on_disk(tmp_path, blocks=160)
    first, second = bench.put(range(120)), bench.put(range(1000, 1120))  # 30 blocks each
    bench.store.pins.pin(first[-1].key)
    bench.tick()
    bench.store.pins.pin(second[-1].key)
    bench.store.close()
    bench = on_disk(tmp_path, blocks=80)  # 40 may be pinned
    report = bench.store.report().tiers[0]
    assert report.used_bytes + report.reserved_bytes <= 80 * FILE_BYTES
    pressure(bench, 160)
    assert bench.in_tier(0) >= keys_of(first)
    assert not bench.in_tier(0) & keys_of(second)
    assert second[-1].key in bench.state.pins
    assert not bench.state.pins.in_force(second[-1].key)
    bench.store.close()
    bench = on_disk(tmp_path, blocks=160)
    assert bench.state.pins.in_force(second[-1].key)
    bench.store.close()


def test_an_unknown_chain_cannot_be_pinned() -> None:
    with pytest.raises(UnknownId):
        Bench().store.pins.pin(BlockKey(bytes(32)))


def test_a_dry_run_pins_nothing() -> None:
    bench = Bench()
    chain = bench.put(range(8))
    _, more = bench.store.pins.pin(chain[-1].key, dry_run=True)
    assert more == 2 * FILE_BYTES
    assert not len(bench.state.pins)


def test_a_pinned_tail_is_kept_when_a_longer_sibling_comes() -> None:
    bench = Bench()
    tail = bench.put([1, 2])
    bench.store.pins.pin(tail[-1].key)
    bench.put([1, 2, 3])
    assert bench.state.tree.get(tail[-1].key) is not None


def test_remove_seq_leaves_what_is_pinned_and_does_not_wait() -> None:
    bench = Bench()
    chain = bench.put(range(8))
    bench.store.pins.pin(chain[-1].key)
    keys = [block.key for block in chain]
    assert bench.store.remove_seq(NAMESPACE, keys) == (0, 0)
    bench.store.pins.unpin(chain[-1].key)
    assert bench.store.remove_seq(NAMESPACE, keys)[0] == 2


def test_a_pin_that_cannot_be_written_down_is_no_pin(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    bench = on_disk(tmp_path)
    chain = bench.put(range(8))

    def full(path: Path, pins: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("ollama_tiering.store.upkeep.pinbook.save_pins", full)
    with pytest.raises(OSError, match="No space"):
        bench.store.pins.pin(chain[-1].key)
    assert not len(bench.state.pins)
    assert not bench.state.pins.keeps(chain[0].key)


@pytest.mark.parametrize(
    "text",
    [
        "",
        "{",
        "[]",
        "null",
        '{"version": 2, "pins": []}',
        '{"version": 1, "pins": [{"namespace": "..", "chain": ["x"], "since": 0}]}',
        '{"version": 1, "pins": [{"namespace": 5, "chain": [], "since": 0}]}',
        "[" * 100_000,
    ],
)
def test_a_damaged_file_pins_nothing_and_is_kept_aside(tmp_path: Path, text: str) -> None:
    path = tmp_path / PINS_NAME
    path.write_text(text)
    assert load_pins(path) == []
    pin = Pin(NAMESPACE, (BlockKey(bytes(32)),), 5.0)
    save_pins(path, file_of_pins([pin]))
    assert load_pins(path) == [pin]
    assert path.stat().st_mode & 0o777 == 0o600
    kept = tmp_path / (PINS_NAME + ".bad")
    assert kept.read_text() == text


def test_no_link_and_no_fifo_is_read(tmp_path: Path) -> None:
    path = tmp_path / PINS_NAME
    os.mkfifo(path)
    assert load_pins(path) == []
    pin = Pin(NAMESPACE, (BlockKey(bytes(32)),), 5.0)
    save_pins(path, file_of_pins([pin]))  # did wait for a writer to the pipe
    assert load_pins(path) == [pin]
    path.unlink()
    path.symlink_to(tmp_path / "elsewhere.json")
    with pytest.raises(UnsafeDirectory, match="is a link"):
        load_pins(path)


def test_a_table_counts_what_several_pins_keep() -> None:
    a, b, c = (BlockKey(bytes([n]) * 32) for n in range(3))
    table = PinTable()
    table.add(Pin(NAMESPACE, (a, b), 1.0))
    table.add(Pin(NAMESPACE, (a, c), 2.0))
    table.add(Pin(NAMESPACE, (a, c), 2.0))  # again
    table.discard(b)
    assert [table.keeps(key) for key in (a, b, c)] == [True, False, True]
    assert table.enforce(1, lambda key: 1) == [Pin(NAMESPACE, (a, c), 2.0)]
    assert not table.keeps(a)
    table.discard(c)
    assert not table.keeps(a)
    assert json.dumps([pin.since for pin in table]) == "[]"
