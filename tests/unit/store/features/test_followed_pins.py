"""A pin that follows: what is added to its conversation is kept, too, within the share of pins."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from measure.store import samples
from ollama_tiering.store.books.pins import Pin
from ollama_tiering.store.tiers.names import PINS_NAME
from ollama_tiering.store.tools.admin import Administration
from ollama_tiering.store.upkeep.pin_file import file_of_pins, load_pins
from tests.unit.store.pins import on_disk, pressure
from tests.unit.store.support import Bench, keys_of


def pins(bench: Bench) -> list[Pin]:
    bench.store.run_pending()
    return list(bench.state.pins)


def ends(bench: Bench) -> list[bytes]:
    return [pin.key for pin in pins(bench)]


def test_later_turns_are_kept_and_those_of_a_plain_pin_are_not() -> None:
    bench = Bench(ram=None, local=24)
    first, second = bench.put(range(8)), bench.put(range(100, 108))
    bench.store.pins.pin(first[-1].key, follows=True)
    bench.store.pins.pin(second[-1].key)
    later, other = bench.put(range(16)), bench.put(range(100, 116))
    bench.store.run_pending()
    pressure(bench)
    assert bench.in_tier(0) >= keys_of(later)
    assert not bench.in_tier(0) & (keys_of(other) - keys_of(second))
    assert set(ends(bench)) == {later[-1].key, second[-1].key}


def test_it_moves_on_again_and_again() -> None:
    bench = Bench()
    bench.store.pins.pin(bench.put(range(4))[-1].key, follows=True)
    for length in (8, 12, 20):
        last = bench.put(range(length))[-1].key
        assert ends(bench) == [last]


def test_a_tail_that_grows_is_followed() -> None:
    """The next turn's block has the tail's rows and more, under another key."""
    bench = Bench(ram=None, local=24)
    tail = bench.put([*range(4), 50, 51])
    bench.store.pins.pin(tail[-1].key, follows=True)
    later = bench.put([*range(4), 50, 51, 52, 53, 54])
    assert ends(bench) == [later[-1].key]
    pressure(bench)
    assert bench.in_tier(0) >= keys_of(later)
    assert tail[-1].key not in bench.in_tier(0)  # all of its rows are in the longer one


def test_a_tail_at_the_very_beginning_is_followed_too() -> None:
    bench = Bench()
    bench.store.pins.pin(bench.put([1, 2])[-1].key, follows=True)
    bench.put([1, 3, 4])  # begins alike, and is another
    later = bench.put([1, 2, 3])
    assert ends(bench) == [later[-1].key]


def test_of_two_continuations_it_is_the_longest_then_the_one_used_last() -> None:
    bench = Bench()
    bench.store.pins.pin(bench.put(range(4))[-1].key, follows=True)
    bench.put([*range(4), *range(70, 74)])
    longest = bench.put([*range(4), *range(80, 88)])
    bench.put([*range(4), *range(90, 94)])
    assert ends(bench) == [longest[-1].key]
    other = Bench()
    other.store.pins.pin(other.put(range(4))[-1].key, follows=True)
    other.put([*range(4), *range(70, 74)])
    last = other.put([*range(4), *range(60, 64)])
    assert ends(other) == [last[-1].key]


def test_it_takes_no_more_than_the_share_and_then_stays_where_it_is() -> None:
    bench = Bench(ram=None, local=8)  # of which pins may have half
    chain = bench.put(range(12))
    bench.store.pins.pin(chain[-1].key, follows=True)
    longer = bench.put(range(20))
    assert ends(bench) == [chain[-1].key]
    pressure(bench)
    assert bench.in_tier(0) >= keys_of(chain)
    assert not bench.in_tier(0) & (keys_of(longer) - keys_of(chain))
    bench.store.set_budget(
        bench.state.levels[0].tier.kind, bench.state.levels[0].lru.budget_bytes * 2
    )
    last = bench.put(range(20))
    assert ends(bench) == [last[-1].key]


def test_unpin_by_the_first_and_by_the_present_id() -> None:
    for which in (0, -1):
        bench = Bench()
        admin = Administration(bench.store, alone=True)
        named = bench.put(range(4))[-1].key
        assert admin.pin(named.hex(), follow=True).follows
        present = bench.put(range(12))[-1].key
        assert ends(bench) == [present]
        assert admin.unpin((named, present)[which].hex()).changed
        assert not pins(bench)
        bench.put(range(16))
        assert not pins(bench)


def test_a_plain_pin_becomes_one_that_follows_and_no_pin_becomes_plain() -> None:
    bench = Bench()
    admin = Administration(bench.store, alone=True)
    named = bench.put(range(4))[-1].key.hex()
    assert not admin.pin(named).follows
    again = admin.pin(named, follow=True)
    assert (again.changed, again.follows) == (True, True)
    again = admin.pin(named)
    assert (again.changed, again.follows) == (False, True)
    bench.put(range(8))
    assert len(pins(bench)) == 1
    assert not admin.pin(named).changed  # it has moved on


def test_a_pin_that_it_reaches_stays_and_so_does_what_a_person_pinned() -> None:
    bench = Bench()
    named = bench.put(range(4))[-1].key
    bench.store.pins.pin(named, follows=True)
    reached = bench.put(range(8))[-1].key
    bench.store.pins.pin(reached)
    assert set(ends(bench)) == {named, reached}
    last = bench.put(range(12))[-1].key
    assert set(ends(bench)) == {reached, last}
    assert bench.store.pins.unpin(named)
    assert ends(bench) == [reached]


def test_a_long_turn_is_not_written_down_with_each_block(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    bench = on_disk(tmp_path)
    bench.store.pins.pin(bench.put(range(4))[-1].key, follows=True)
    saved: list[int] = []
    monkeypatch.setattr(bench.store.pins, "_save", lambda **_: saved.append(1))
    for end in range(8, 64, 4):
        present = bench.put(range(end))[-1].key
        assert ends(bench) == [present]
    assert len(saved) == 1


def test_it_goes_on_after_a_restart(tmp_path: Path) -> None:
    bench = on_disk(tmp_path)
    bench.store.pins.pin(bench.put(range(4))[-1].key, follows=True)
    present = bench.put(range(8))[-1].key
    assert ends(bench) == [present]
    bench.store.close()
    (written,) = load_pins(tmp_path / "local" / PINS_NAME)
    assert written.key == present
    bench = on_disk(tmp_path)
    assert ends(bench) == [present]
    last = bench.put(range(12))[-1].key
    assert ends(bench) == [last]


def test_what_came_while_its_move_could_not_be_written_is_found_at_the_next_start(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    bench = on_disk(tmp_path)
    named = bench.put(range(4))[-1].key
    bench.store.pins.pin(named, follows=True)

    def fail(**_: object) -> None:
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(bench.store.pins, "_save", fail)
        present = bench.put(range(8))[-1].key
        assert ends(bench) == [present]
        bench.store.close()
    (written,) = load_pins(tmp_path / "local" / PINS_NAME)
    assert written.key == named
    assert ends(on_disk(tmp_path)) == [present]


def test_the_file_says_it_in_a_field_that_older_versions_do_not_read(tmp_path: Path) -> None:
    blocks = samples.sequence(samples.namespace("n"), range(8))
    chain = tuple(block.key for block in blocks)
    plain = Pin(samples.namespace("n").digest(), chain, 1.0)
    following = Pin(plain.namespace, chain, 1.0, chain[0])
    for pin in (plain, following):
        path = tmp_path / "pins.json"
        path.write_text(file_of_pins([pin]))
        assert load_pins(path) == [pin]
        (entry,) = json.loads(path.read_text())["pins"]
        assert entry.get("follow") == (chain[0].hex() if pin is following else None)
        entry.pop("follow", None)
        assert entry.keys() == {"namespace", "chain", "since"}
    path.write_text(path.read_text().replace(f'"follow": "{chain[0].hex()}"', '"follow": 7'))
    assert load_pins(path) == []
