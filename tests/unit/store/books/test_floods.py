"""A conversation that goes on stays whole beside prompts that are asked for once."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import pytest

from measure.store import samples
from measure.store.replay import Replay
from measure.store.traces import Ask, Talk, Words
from ollama_tiering.store.block.key import BlockKey
from tests.unit.store.support import BLOCK_TOKENS, NS, Bench, keys_of

SYSTEM = list(range(8))


def turns(bench: Bench, count: int, first: int = 100) -> list[int]:
    """A conversation after so many turns of two blocks each, each looked up and then stored."""
    tokens = list(SYSTEM)
    for turn in range(count):
        tokens += range(first + 8 * turn, first + 8 * turn + 8)
        bench.rows(tokens)
        bench.put(tokens)
    return tokens


def flood(bench: Bench, documents: int = 32, system: Sequence[int] = ()) -> None:
    """Documents of six blocks, each asked for and stored once."""
    for number in range(documents):
        document = [*system, *range(10_000 + 24 * number, 10_000 + 24 * number + 24)]
        bench.rows(document)
        bench.put(document)


def protected(bench: Bench, index: int = 0) -> set[BlockKey]:
    return set(bench.state.levels[index].lru.segments()[1])


@pytest.mark.parametrize("system", [(), SYSTEM], ids=["own", "shared"])
def test_a_flood_leaves_a_chat_of_three_turns_whole(system: Sequence[int]) -> None:
    bench = Bench(ram=None, local=20)
    chat = turns(bench, 3)
    flood(bench, system=system)
    assert bench.rows(chat) == len(chat)


def test_a_flood_leaves_a_chat_whole_that_went_on_in_memory() -> None:
    bench = Bench(ram=None, local=20)
    chat = list(range(100, 106))
    for turn in range(4):  # each ends within a block, and no look-up tells of the next
        bench.put(chat)
        chat += range(200 + 8 * turn, 200 + 8 * turn + 8)
    flood(bench)
    assert bench.rows(chat[:-8]) == len(chat) - 8


def test_an_end_that_a_look_up_came_back_to_is_not_counted_twice() -> None:
    bench = Bench()
    (first, _) = bench.put([1, 2, 3, 4, 5, 6])
    bench.rows([1, 2, 3, 4, 5, 6, 7])
    bench.put([1, 2, 3, 4, 5, 6, 7])
    assert bench.state.tree.get(first.key).hits == 1  # type: ignore[union-attr]


def test_what_is_new_after_two_turns_is_worth_as_much_as_what_was_asked_for() -> None:
    bench = Bench(ram=None, local=40)
    chat = turns(bench, 3)
    assert protected(bench) == keys_of(samples.sequence(NS, chat))


def test_a_second_turn_is_not_yet_one_that_goes_on() -> None:
    bench = Bench(ram=None, local=40)
    chat = turns(bench, 2)
    assert protected(bench) == keys_of(samples.sequence(NS, chat[:-8]))


def test_documents_below_a_shared_beginning_are_worth_no_more_than_others() -> None:
    bench = Bench(ram=None, local=100)
    flood(bench, documents=6, system=SYSTEM)
    assert protected(bench) == keys_of(samples.sequence(NS, SYSTEM))


def test_the_second_question_about_one_of_many_documents_is_no_turn() -> None:
    bench = Bench(ram=None, local=100)
    flood(bench, documents=4, system=SYSTEM)
    document = [*SYSTEM, *range(10_000, 10_024)]
    question = [*document, *range(900, 908)]
    bench.rows(question)
    bench.put(question)
    assert protected(bench) == keys_of(samples.sequence(NS, document))


def test_it_is_known_again_after_a_restart(tmp_path: Path) -> None:
    bench = Bench(ram=None, local=20, index_path=tmp_path / "index.sqlite")
    chat = turns(bench, 3)
    bench.store.close()
    bench.open()
    assert protected(bench) == keys_of(samples.sequence(NS, chat))
    flood(bench)
    assert bench.rows(chat) == len(chat)


def test_a_copy_in_another_tier_is_worth_as_much() -> None:
    bench = Bench(ram=40, local=40)
    chat = turns(bench, 3)
    bench.store.run_pending()
    assert protected(bench, 0) == protected(bench, 1) == keys_of(samples.sequence(NS, chat))


def test_a_window_of_the_latest_turn_is_kept_as_the_turn_is() -> None:
    bench = Bench(ram=None, local=40)
    chat = turns(bench, 3)
    blocks = samples.sequence(NS, chat)
    end = samples.window(NS, blocks[-1], chat[-BLOCK_TOKENS:], len(chat) - BLOCK_TOKENS)
    old = samples.window(NS, blocks[1], chat[4:8], 4)
    assert all(result.stored for result in bench.try_put([old, end]))
    assert end.key in protected(bench)
    assert old.key not in protected(bench)


@pytest.mark.parametrize(("thinks", "ram"), [(0, 0), (1200, 64_000)])
def test_32_documents_of_20_000_tokens_leave_a_live_chat_whole(thinks: int, ram: int) -> None:
    """Also where other chats filled the tier before, and with each answer's thoughts left out of
    the next prompt.
    """
    words, replay = Words(), Replay(ram=ram, disk=128_000)
    instruction, system = words.new(400), words.new(600)
    for _ in range(6):
        other = Talk(words, list(system))
        replay.all(other.turn(2000, 1000) for _ in range(8))
    chat = Talk(words, list(system), thinks, live=True)
    replay.all(chat.turn(1500, 800) for _ in range(4))
    replay.all(Ask((*instruction, *words.new(20_000)), tuple(words.new(300))) for _ in range(32))
    before = replay.found.live_asked, replay.found.live_matched
    replay.ask(chat.turn(700, 700))
    asked, matched = replay.found.live_asked - before[0], replay.found.live_matched - before[1]
    assert asked > 8000
    assert matched == asked
