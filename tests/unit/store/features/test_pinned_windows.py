"""A pin keeps the window blocks that hang on what it keeps: those there, those that come, those
that come back; as far as pins may take room.
"""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path

import pytest

from measure.store import samples
from ollama_tiering.store.books.policy import StorePolicy
from ollama_tiering.store.errors import PinsFull
from ollama_tiering.store.tiers.names import INDEX_NAME, PINS_NAME
from ollama_tiering.store.values import Selection
from tests.unit.store.administration import DAY, Tools
from tests.unit.store.pins import on_disk, pressure
from tests.unit.store.support import FILE_BYTES, NS, Bench, keys_of
from tests.unit.store.windows import TOKENS, hang, hang_on_all


def test_a_pinned_chain_keeps_its_windows_and_another_does_not() -> None:
    bench = Bench(ram=None, local=12)
    pinned = bench.put(TOKENS)
    kept = hang_on_all(bench, pinned)
    loose = bench.put(range(100, 104))
    other = hang(bench, loose[0], range(100, 104))
    bench.store.pins.pin(pinned[-1].key)
    assert bench.store.pins.pinned_bytes() == 6 * FILE_BYTES
    pressure(bench)
    assert bench.in_tier(0) >= keys_of([*pinned, *kept])
    assert not bench.in_tier(0) & keys_of([*loose, other])
    bench.store.pins.unpin(pinned[-1].key)
    assert bench.store.pins.pinned_bytes() == 0
    pressure(bench)
    assert not bench.in_tier(0) & keys_of(kept)


def test_of_a_block_inside_a_chain_those_before_it_are_kept_only() -> None:
    bench = Bench(ram=None, local=12)
    chain = bench.put(TOKENS)
    windows = hang_on_all(bench, chain)
    bench.store.pins.pin(chain[1].key)
    pressure(bench)
    assert bench.in_tier(0) & keys_of([*chain, *windows]) == keys_of([*chain[:2], *windows[:2]])


def test_a_window_that_comes_later_is_kept_too() -> None:
    bench = Bench(ram=None, local=12)
    chain = bench.put(TOKENS)
    bench.store.pins.pin(chain[-1].key)
    windows = hang_on_all(bench, chain)
    bench.store.run_pending()
    assert bench.store.pins.pinned_bytes() == 6 * FILE_BYTES
    pressure(bench)
    assert bench.in_tier(0) >= keys_of([*chain, *windows])


def test_in_ram_it_may_go_once_it_is_written_down() -> None:
    bench = Bench(ram=4, local=16)
    chain = bench.put(TOKENS[:8])
    window = hang(bench, chain[1], TOKENS[4:8])
    bench.store.pins.pin(chain[-1].key)
    pressure(bench, 8)
    assert window.key in bench.in_tier(1)
    assert window.key not in bench.in_tier(0)


def test_what_a_scan_finds_is_kept_and_the_file_of_pins_knows_nothing_of_it(
    tmp_path: Path,
) -> None:
    bench = on_disk(tmp_path, blocks=4096, index=True)
    chain = bench.put(TOKENS)
    bench.store.pins.pin(chain[-1].key)
    before = (tmp_path / "local" / PINS_NAME).read_text()
    windows = hang_on_all(bench, chain)
    bench.store.close()
    (pin,) = json.loads((tmp_path / "local" / PINS_NAME).read_text())["pins"]
    assert pin["chain"] == [block.key.hex() for block in chain]
    assert (tmp_path / "local" / PINS_NAME).read_text() == before
    for name in (tmp_path / "local").glob(INDEX_NAME + "*"):
        name.unlink()
    bench = on_disk(tmp_path, blocks=80)
    assert bench.store.pins.pinned_bytes() == 6 * FILE_BYTES
    pressure(bench, 120)
    assert bench.in_tier(0) >= keys_of([*chain, *windows])
    bench.store.close()


def test_windows_count_when_a_chain_is_pinned() -> None:
    bench = Bench(ram=None, local=8, pin_share=0.5)
    chain = bench.put(TOKENS)
    windows = hang_on_all(bench, chain)
    with pytest.raises(PinsFull):
        bench.store.pins.pin(chain[-1].key)
    assert not bench.state.pins.keeps(windows[0].key)
    bench.store.pins.pin(chain[1].key)  # 4 of 8 blocks: exactly the share
    assert bench.store.pins.pinned_bytes() == 4 * FILE_BYTES == bench.store.pins.limit_bytes


def test_windows_that_come_take_no_more_than_the_share_and_put_no_pin_out_of_force(
    tmp_path: Path,
) -> None:
    bench = on_disk(tmp_path, blocks=80, pin_share=5 / 80)
    chain = bench.put(TOKENS[:8])
    first = hang(bench, chain[1], TOKENS[4:8])
    bench.store.pins.pin(chain[-1].key)
    more = [hang(bench, chain[1], TOKENS[4:8], at) for at in (1, 2, 3)]
    bench.store.run_pending()
    pins = bench.state.pins
    kept = [one for one in (first, *more) if pins.keeps(one.key)]
    assert len(kept) == 3
    assert kept[0] is first
    assert bench.store.pins.pinned_bytes() == 5 * FILE_BYTES == bench.store.pins.limit_bytes
    bench.store.pins.enforce()
    bench.store.pins.pin(chain[-1].key)  # again: fine
    assert [one for one in (first, *more) if pins.keeps(one.key)] == kept
    assert pins.in_force(chain[-1].key)
    bench.store.close()
    bench = on_disk(tmp_path, blocks=80, pin_share=5 / 80)
    assert bench.store.pins.pinned_bytes() == 5 * FILE_BYTES
    assert bench.state.pins.in_force(chain[-1].key)
    pressure(bench, 120)
    assert len(bench.in_tier(0) & keys_of([first, *more])) == 3
    bench.store.close()


def test_the_oldest_windows_are_kept_where_not_all_can_be() -> None:
    bench = Bench(ram=None, local=16, pin_share=4 / 16)
    chain = bench.put(TOKENS[:8])
    bench.store.pins.pin(chain[-1].key)
    windows = [hang(bench, chain[1], TOKENS[4:8], at) for at in range(4)]
    for age, window in enumerate(sorted(windows, key=lambda one: one.key, reverse=True)):
        record = bench.state.tree.get(window.key)
        assert record is not None
        record.created += age
    bench.store.run_pending()
    kept = {one.key for one in windows if bench.state.pins.keeps(one.key)}
    assert kept == set(sorted(keys_of(windows))[2:])


def test_what_is_kept_is_not_given_up_for_one_that_comes_later() -> None:
    """Not even for an older one, as an import brings it."""
    bench = Bench(ram=None, local=16, pin_share=3 / 16)
    chain = bench.put(TOKENS[:8])
    windows = [samples.window(NS, chain[1], TOKENS[4:8], 4, at) for at in range(4)]
    windows.sort(key=lambda one: one.key, reverse=True)
    for window in windows:  # each would go before those that are there
        assert bench.try_put([window])[0].stored
        bench.store.pins.pin(chain[-1].key)
        bench.store.run_pending()
        assert [one for one in windows if bench.state.pins.keeps(one.key)] == windows[:1]


def test_age_does_not_take_a_kept_window() -> None:
    bench = Bench(ram=None, policy=StorePolicy(ttl_seconds=30 * DAY))
    chain = bench.put(TOKENS)
    windows = hang_on_all(bench, chain)
    loose = bench.put([77])
    bench.store.pins.pin(chain[-1].key)
    for _ in range(80):
        bench.tick(DAY)  # the clock that ages and the one that waits are the same here
        bench.store.run_pending()
    assert bench.in_tier(0) == keys_of([*chain, *windows])
    assert not bench.in_tier(0) & keys_of(loose)


def test_a_longer_tail_does_not_take_a_pinned_one_with_its_window() -> None:
    bench = Bench()
    chain = bench.put(TOKENS)
    windows = hang_on_all(bench, chain)
    bench.store.pins.pin(chain[-1].key)
    bench.put([*TOKENS, 10])
    assert bench.in_tier(0) >= keys_of([chain[-1], windows[-1]])


def test_the_tools_count_windows_and_leave_what_is_pinned(tmp_path: Path) -> None:
    tools = Tools(tmp_path)
    chain = tools.put(TOKENS)
    windows = hang_on_all(tools.bench, chain)
    tools.bench.store.run_pending()
    result = tools.admin.pin(windows[2].key.hex())  # its id stands for the block it hangs on
    assert (result.key, result.blocks, result.changed_bytes) == (chain[-1].key, 6, 6 * FILE_BYTES)
    assert result.pinned_bytes == 6 * FILE_BYTES
    lines = tools.admin.listing(Selection(ids=(chain[-1].key.hex(),)), blocks=True).blocks
    assert [line.key for line in lines] == [
        one.key for pair in zip(chain, windows, strict=True) for one in pair
    ]
    assert all(line.pinned for line in lines)
    done = tools.admin.remove(Selection(), dry_run=False)
    assert (done.blocks, done.kept) == (0, {"pinned": 3})
    result = tools.admin.unpin(chain[-1].key.hex())
    assert (result.blocks, result.changed_bytes, result.pinned_bytes) == (6, 6 * FILE_BYTES, 0)
    done = tools.admin.remove(Selection(), dry_run=False)
    assert (done.blocks, done.kept) == (6, {})
    tools.bench.store.close()


def test_a_rule_that_forbids_the_model_takes_kept_windows_too() -> None:
    bench = Bench()
    chain = bench.put(TOKENS)
    hang_on_all(bench, chain)
    bench.store.pins.pin(chain[-1].key)
    terms = dataclasses.replace(bench.state.terms.unknown, refusal="a rule", remove=True)
    bench.store.set_terms(lambda _: terms)
    bench.store.run_pending()
    assert not list(bench.state.tree)
    assert bench.store.pins.pinned_bytes() == 0


def test_a_window_that_is_gone_is_counted_no_more() -> None:
    bench = Bench()
    chain = bench.put(TOKENS[:4])
    window = hang(bench, chain[0], TOKENS[:4])
    bench.store.pins.pin(chain[0].key)
    for level in bench.state.levels:
        with bench.state.lock:
            bench.state.forget_copy(level, window.key)
    assert bench.store.pins.pinned_bytes() == FILE_BYTES
    assert not bench.state.pins.keeps(window.key)
    hang(bench, chain[0], TOKENS[:4])
    bench.store.run_pending()
    assert bench.store.pins.pinned_bytes() == 2 * FILE_BYTES
