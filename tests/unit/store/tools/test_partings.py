"""Where prompts part from what is stored: which of the stored paths is meant, and what of it is the
same again.
"""

from __future__ import annotations

from collections.abc import Sequence

import pytest

from measure.store import samples
from ollama_tiering.store import Terms, TieredStore
from ollama_tiering.store.block.key import Namespace, prefix_chain, tokens_to_bytes
from ollama_tiering.store.tiers.contract import TierKind
from ollama_tiering.store.tiers.memory import MemoryTier
from ollama_tiering.store.tools import partings
from ollama_tiering.store.tools.partings import Parting, PartingFinder, PartingKind
from ollama_tiering.store.tools.resync import RUN_TOKENS, Resync, resync
from tests.tokens import tokens_from_bytes

STEP = 64


def namespace(layers: int = 1) -> Namespace:
    return samples.namespace("model", layers=layers, block_tokens=STEP)


class Kept:
    """A store in memory that is asked and filled as engines do it."""

    def __init__(self, budget_bytes: int = 1 << 26) -> None:
        self.now = 1000.0
        self.store = TieredStore(
            [(MemoryTier(TierKind.RAM), budget_bytes)],
            background=False,
            measure=False,
            clock=lambda: self.now,
            wall_clock=lambda: self.now,
        )
        self.finder = PartingFinder(self.store)

    def put(self, tokens: Sequence[int], ns: Namespace | None = None) -> None:
        ns = ns or namespace()
        session = self.store.open_session(ns.digest(), ns.fields(), STEP)
        for block in samples.sequence(ns, tokens):
            session.put_inline(block.key, block.data, last=True)
        self.store.close_session(session)
        self.now += 1

    def ask(self, tokens: Sequence[int], ns: Namespace | None = None) -> int:
        data, name = tokens_to_bytes(tokens), (ns or namespace()).digest()
        keys = prefix_chain(name, data, STEP, ())
        return sum(one.rows for one in self.store.match(name, keys, data, STEP))

    def partings(self) -> list[Parting]:
        found = []
        while (noted := self.finder.next()) is not None:
            found += [noted[1]] if noted[1] else []
        return found


def run(first: int, count: int) -> list[int]:
    return list(range(first, first + count))


@pytest.mark.parametrize("at", [30, 64, 100, 128])
def test_both_sides_and_where_they_are_the_same_again(at: int) -> None:
    kept = Kept()
    same = run(1000, 300)
    kept.put([*run(0, at), 7777, *same])
    assert kept.ask([*run(0, at), 8888, 8889, *same]) == at
    (found,) = kept.partings()
    assert found.kind is PartingKind.DIFFERS
    assert (found.at_token, found.prompt_tokens, found.lost_tokens) == (at, at + 302, 300)
    assert tokens_from_bytes(found.before) == run(0, at)
    assert tokens_from_bytes(found.asked) == [8888, 8889, *same]
    assert tokens_from_bytes(found.stored) == [7777, *same]
    assert (found.skipped_asked, found.skipped_stored) == (2, 1)


def test_it_is_the_same_when_the_prompt_was_stored_itself_meanwhile() -> None:
    for at in (30, 64):
        kept = Kept()
        stored, asked = [*run(0, at), 7777, *run(1000, 300)], [*run(0, at), 8888, *run(1000, 300)]
        kept.put(stored)
        kept.ask(asked)
        kept.put(asked)
        (found,) = kept.partings()
        assert tokens_from_bytes(found.stored) == stored[at:]


def test_of_many_that_part_there_the_one_with_most_in_common_is_meant() -> None:
    kept = Kept()
    head = run(0, 100)
    mine = run(5000, 400)
    kept.put([*head, *mine])
    for number in range(5):
        kept.put([*head, *run(20_000 + 1000 * number, 300)])
    kept.ask([*head, *mine[200:], *run(9000, 100)])  # its first messages were left out
    (found,) = kept.partings()
    assert found.lost_tokens == 200
    assert (found.skipped_asked, found.skipped_stored) == (0, 200)


@pytest.mark.parametrize(
    ("stored", "asked"),
    [
        (run(0, 200), [*run(0, 200), *run(900, 200)]),
        (run(0, 192), [*run(0, 192), *run(900, 200)]),
        (run(0, 200), run(0, 200)),
        (run(0, 200), run(900, 200)),
        (run(0, 200), run(0, 150)),
    ],
    ids=["goes on", "goes on behind a whole block", "the same", "nothing alike", "a part of it"],
)
def test_what_goes_on_from_all_that_is_stored_parts_from_nothing(
    stored: list[int], asked: list[int]
) -> None:
    kept = Kept()
    kept.put(stored)
    kept.ask(asked)
    assert kept.partings() == []


def test_another_prompt_that_begins_alike_has_lost_nothing() -> None:
    kept = Kept()
    kept.put([*run(0, 100), *run(5000, 9000)])
    kept.ask([*run(0, 100), *run(20_000, 9000)])
    (found,) = kept.partings()
    assert found.lost_tokens == 0
    assert len(found.asked) == len(found.stored) == 4 * partings.MOST_WITHOUT_LOSS


def test_what_was_evicted_is_told_from_what_is_new() -> None:
    size = len(samples.sequence(namespace(), run(0, STEP))[0].data)
    kept = Kept(budget_bytes=12 * size)
    mine = run(0, 6 * STEP)
    kept.put(mine)
    kept.now = 2000.0
    kept.put(run(50_000, 10 * STEP))
    left = kept.ask([*mine, *run(9000, 100)])
    assert left < 6 * STEP
    (found,) = kept.partings()
    assert found.kind is PartingKind.EVICTED
    assert found.lost_tokens == 6 * STEP - left
    assert found.evicted_unix_seconds == 2000.0
    kept.ask([*mine[:left], *run(30_000, 300)])  # not of what was evicted
    assert kept.partings() == []


def test_what_is_stored_under_other_settings_is_named() -> None:
    kept = Kept()
    mine = run(0, 300)
    kept.put(mine, namespace(layers=2))
    kept.put(run(7000, 100))
    assert kept.ask([*mine, 1]) == 0
    (found,) = kept.partings()
    assert found.kind is PartingKind.OTHER_SETTINGS
    assert (found.lost_tokens, found.elsewhere) == (300, namespace(layers=2).digest())
    kept.ask(mine[:40] + run(800, 90))  # too little of it to be worth a word
    assert kept.partings() == []


def test_nothing_of_a_model_that_a_rule_keeps_out_is_told() -> None:
    kept = Kept()
    kept.put([*run(0, 100), 7, *run(1000, 300)])
    terms = Terms(refusal="a rule")
    kept.store.set_terms(lambda _: terms)
    kept.ask([*run(0, 100), 8, *run(1000, 300)])
    assert kept.partings() == []


def test_a_long_prompt_is_kept_in_part() -> None:
    kept = Kept(budget_bytes=1 << 28)
    head, tail = run(0, 40_000), run(100_000, 20_000)
    kept.put([*head, 1, *tail])
    kept.ask([*head, 2, *tail])
    (found,) = kept.partings()
    assert tokens_from_bytes(found.before) == head[-partings.MOST_BEFORE :]
    assert len(found.asked) == len(found.stored) == 4 * partings.MOST_BEHIND
    assert found.lost_tokens == partings.MOST_BEHIND - 1


def same_again(asked: list[int], stored: list[int]) -> Resync | None:
    return resync(tokens_to_bytes(asked), tokens_to_bytes(stored))


def test_runs_that_come_in_one_order_on_both_sides_are_added_up() -> None:
    first, second = run(100, 50), run(200, 50)
    assert same_again([1, *first, 2, *second], [3, 4, *first, *second]) == (1, 2, 100)
    assert same_again([*second, *first], [*first, *second]) == (0, 50, 50)
    assert same_again(first[: RUN_TOKENS - 1], first[: RUN_TOKENS - 1]) is None
    assert same_again([], first) is None
    assert same_again(first, run(300, 50)) is None


def test_what_is_alike_is_not_the_same() -> None:
    """Bytes of two tokens that look like those of one token between them."""
    odd = tokens_to_bytes(run(1 << 16, 64))
    assert resync(odd, b"\0" + odd[:-1]) is None


def test_the_first_place_of_a_run_is_found_also_far_behind() -> None:
    tail = run(50_000, 500)
    for far in (300, 3001, 8000):
        found = same_again([*run(0, far), *tail], [9, *tail])
        assert found == (far, 1, 500), far
