"""The replays: a live chat beside one-shot documents, by today's rules and by others."""

from __future__ import annotations

import itertools
from collections.abc import Iterator

from measure.store.keeping import _NOW, _OTHERS, replayed
from measure.store.replay import BlockTree
from measure.store.traces import TRACES, Ask, Talk, Words


def beside_documents(words: Words) -> Iterator[Ask]:
    talk = Talk(words, words.new(300), live=True)
    for _ in range(4):
        yield talk.turn(1000, 500)
    for _ in range(12):
        yield Ask(tuple(words.new(4000)), tuple(words.new(100)))
    yield talk.turn(500, 500)


def test_only_the_rules_of_now_find_all_of_the_chat() -> None:
    asks = list(beside_documents(Words()))
    found = {rules.name: replayed(asks, 20_000, rules).live_share for rules in (_NOW, *_OTHERS)}
    assert found["now"] == 1.0
    assert max(share for name, share in found.items() if name != "now") < 1.0
    assert found["LRU"] < found["SLRU alone"]


def test_the_rules_of_before_are_only_for_one_replay() -> None:
    rule = BlockTree._goes_on
    replayed([], 1000, _OTHERS[0])
    assert BlockTree._goes_on is rule


def test_traces_are_the_same_each_time_and_grow_as_prompts_do() -> None:
    for trace in TRACES.values():
        first = list(itertools.islice(trace(Words()), 40))
        assert first == list(itertools.islice(trace(Words()), 40))
        assert all(ask.prompt for ask in first)
