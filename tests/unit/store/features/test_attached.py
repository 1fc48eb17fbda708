"""A look-up names the window blocks of what it finds; they count as used when they are fetched."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

import pytest

from measure.store import samples
from ollama_tiering.sidecar import look_up
from ollama_tiering.store.block.key import BlockKey, prefix_chain, tokens_to_bytes
from ollama_tiering.store.block.pb import block_store_pb2 as pb
from ollama_tiering.store.books import matching
from ollama_tiering.store.books.policy import SECOND_TOUCH, StorePolicy
from ollama_tiering.store.books.report import MatchedBlock
from ollama_tiering.store.books.tree import BlockRecord
from ollama_tiering.store.serving import lookup
from tests.unit.store.support import BLOCK_TOKENS, FILE_BYTES, NAMESPACE, NS, Bench, keys_of
from tests.unit.store.windows import TOKENS, hang, hang_on_all


def attached(found: list[MatchedBlock]) -> list[set[BlockKey]]:
    return [{one.key for one in block.attached} for block in found]


def answer(bench: Bench, tokens: list[int]) -> pb.HasResponse:
    data = tokens_to_bytes(tokens)
    keys = prefix_chain(NAMESPACE, data, BLOCK_TOKENS)
    request = pb.HasRequest(namespace=NAMESPACE, keys=keys, tokens=data, block_tokens=BLOCK_TOKENS)
    return asyncio.run(look_up.LookUps(bench.store).answer(request))


def test_every_block_that_is_found_names_its_windows() -> None:
    bench = Bench()
    windows = hang_on_all(bench, bench.put(TOKENS))
    more = hang(bench, bench.put(TOKENS)[1], TOKENS[4:8], first=2)
    found = bench.match([*TOKENS[:9], 77])  # of the last block one row
    assert [block.rows for block in found] == [4, 4, 1]
    assert attached(found) == [
        {windows[0].key},
        {windows[1].key, more.key},
        {windows[2].key},
    ]
    assert attached(bench.match(TOKENS[:4])) == [{windows[0].key}]


def test_it_says_how_large_they_are_and_how_soon_they_could_be_had() -> None:
    bench = Bench()
    windows = hang_on_all(bench, bench.put(TOKENS))
    (one,) = bench.match(TOKENS)[0].attached
    record = bench.state.tree.get(windows[0].key)
    assert record is not None
    nearest, seconds = bench.state.nearest(record, bench.state.speeds())
    assert nearest == 0
    assert one == (windows[0].key, FILE_BYTES, FILE_BYTES, seconds)
    (named,) = answer(bench, TOKENS).blocks[0].attached
    assert (named.key, named.stored_bytes, named.raw_bytes, named.expected_seconds) == one


def test_a_window_that_is_out_of_reach_is_not_named(monkeypatch: pytest.MonkeyPatch) -> None:
    bench = Bench()
    windows = hang_on_all(bench, bench.put(TOKENS))
    bench.store.run_pending()
    with bench.state.lock:
        assert bench.state.drop_copy(bench.state.levels[0], windows[1].key)
    assert bench.match(TOKENS)[1].attached
    monkeypatch.setattr(bench.state, "resting", lambda: [1])
    assert attached(bench.match(TOKENS)) == [{windows[0].key}, set(), {windows[2].key}]


def test_of_many_on_one_block_those_used_last_are_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(matching, "MOST_ON_ONE", 2)
    bench = Bench(ram=16)
    block = bench.put(TOKENS[:4])[0]
    windows = [hang(bench, block, TOKENS[:4], first) for first in range(4)]
    assert attached(bench.match(TOKENS)) == [keys_of(windows[2:])]
    bench.store.release(bench.lease(windows[:1]))
    assert attached(bench.match(TOKENS)) == [keys_of([windows[0], windows[3]])]


def test_of_too_many_in_one_answer_those_of_the_last_blocks_are_named(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    bench = Bench()
    windows = hang_on_all(bench, bench.put(TOKENS))
    for most, piece in ((2, 512), (2, 1), (1, 2), (3, 1)):
        monkeypatch.setattr(matching, "MAX_ATTACHED", most)
        monkeypatch.setattr(look_up, "MAX_ATTACHED", most)
        for module in (lookup, look_up):
            monkeypatch.setattr(module, "PIECE_BLOCKS", piece)
        named = [[one.key for one in block.attached] for block in answer(bench, TOKENS).blocks]
        wanted = [[window.key] for window in windows]
        wanted[: 3 - most] = [[]] * (3 - most)
        assert named == wanted


def test_a_model_without_windows_is_not_asked_for_them(monkeypatch: pytest.MonkeyPatch) -> None:
    bench = Bench()
    blocks = bench.put(TOKENS)
    tree = bench.state.tree
    windows = hang_on_all(bench, blocks)
    assert tree.has_windows(NAMESPACE)
    for window in windows:
        for level in bench.state.levels:
            with bench.state.lock:
                bench.state.forget_copy(level, window.key)
    assert not tree.has_windows(NAMESPACE)

    def refuse(key: bytes) -> None:
        raise AssertionError("asked for each block")

    monkeypatch.setattr(tree, "windows", refuse)
    assert attached(bench.match(TOKENS)) == [set(), set(), set()]


def test_a_look_up_is_no_use_of_a_window_and_its_fetch_is() -> None:
    bench = Bench()
    windows = hang_on_all(bench, bench.put(TOKENS))
    bench.match(TOKENS)
    probation, protected = (set(part) for part in bench.state.levels[0].lru.segments())
    assert probation == keys_of(windows)
    assert not protected & keys_of(windows)
    bench.store.release(bench.lease(windows[1:]))
    probation, protected = (set(part) for part in bench.state.levels[0].lru.segments())
    assert probation == {windows[0].key}
    assert protected > keys_of(windows[1:])
    hits = [record.hits for one in windows if (record := bench.state.tree.get(one.key))]
    assert hits == [0, 1, 1]


def test_a_window_that_was_fetched_outlives_what_was_only_written() -> None:
    bench = Bench(ram=None, local=8)
    blocks = bench.put(TOKENS)
    windows = hang_on_all(bench, blocks)
    bench.match(TOKENS)
    bench.store.release(bench.lease(windows[2:]))
    for token in range(200, 230):
        bench.put([token])
    assert keys_of(blocks) <= bench.in_tier(0)
    assert bench.in_tier(0) & keys_of(windows) == {windows[2].key}


def test_under_second_touch_a_fetch_is_what_makes_a_window_worth_the_disk() -> None:
    bench = Bench(policy=StorePolicy(admission=SECOND_TOUCH))
    windows = hang_on_all(bench, bench.put(TOKENS))
    bench.match(TOKENS)
    bench.store.run_pending()
    assert not bench.in_tier(1) & keys_of(windows)
    bench.store.release(bench.lease(windows[1:2]))
    bench.store.run_pending()
    assert bench.in_tier(1) & keys_of(windows) == {windows[1].key}


def test_the_rows_of_a_window_do_not_make_a_prefix_longer() -> None:
    bench = Bench(policy=StorePolicy(min_tokens=5))
    short = bench.put(TOKENS[:4])
    window = hang(bench, short[0], TOKENS[:4])
    long = bench.put([*range(50, 56)])
    other = hang(bench, long[1], [54, 55])
    bench.store.run_pending()
    assert bench.in_tier(1) == keys_of([*long, other])
    assert bench.in_tier(0) >= keys_of([*short, window])


@pytest.mark.parametrize("with_window", [0, 1])
def test_of_two_answers_to_a_prompt_the_one_with_its_window_is_found(with_window: int) -> None:
    """Both begin with the same nine tokens; the other has more windows, at its own end."""
    bench = Bench()
    answers = [[*range(9), 100], [*range(9), 200]]
    ends = [bench.put(answer)[2] for answer in answers]
    for first in range(2):
        hang(bench, ends[1 - with_window], answers[1 - with_window][8:], first)
    window = samples.window(NS, ends[with_window], [8], 8, others=[])
    assert all(result.stored for result in bench.try_put([window]))
    bench.tick()
    found = bench.match([*range(9), 77])
    assert [block.rows for block in found] == [4, 4, 1]
    assert found[2].key == ends[with_window].key
    assert window.key in attached(found)[2]


def test_only_windows_that_end_within_what_is_shared_are_counted() -> None:
    """Tokens come again and again, so that those of a window say nothing of where it ends."""
    bench = Bench(ram=16)
    right, wrong = bench.put([*range(8), 8, 8, 100])[2], bench.put([*range(8), 8, 8, 7, 8])[2]
    windows = [
        samples.window(NS, wrong, [8, 8, 7, 8], 8, first=3, others=[]),  # ends after it
        samples.window(NS, wrong, [8, 8], 8),  # no window ends with it
        samples.window(NS, wrong, [8], 8),
    ]
    assert all(result.stored for result in bench.try_put(windows))
    assert bench.match([*range(8), 8, 8, 77])[2].key == wrong.key  # the first by its tokens
    window = samples.window(NS, right, [8, 8], 8, first=1, others=[])
    assert all(result.stored for result in bench.try_put([window]))
    assert bench.match([*range(8), 8, 8, 77])[2].key == right.key
    for level in bench.state.levels:
        with bench.state.lock:
            bench.state.forget_copy(level, window.key)
    assert bench.match([*range(8), 8, 8, 77])[2].key == wrong.key


def test_however_many_windows_hang_on_a_chain_few_are_looked_at(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    bench = Bench(ram=32)
    blocks = bench.put(TOKENS)
    for block, part in zip(blocks, (TOKENS[:4], TOKENS[4:8], TOKENS[8:]), strict=True):
        for first in range(len(part)):
            hang(bench, block, part, first)
    tree, looked = bench.state.tree, []
    windows = tree.windows

    def watched(key: bytes, most: int | None = None) -> Sequence[BlockRecord]:
        found = windows(key, most)
        looked.append(len(found))
        return found

    monkeypatch.setattr(tree, "windows", watched)
    assert [len(keys) for keys in attached(bench.match(TOKENS))] == [4, 4, 2]
    assert looked == [2, 4, 4]
    looked.clear()
    monkeypatch.setattr(matching, "MAX_LOOKED_AT", 5)
    assert [len(keys) for keys in attached(bench.match(TOKENS))] == [0, 3, 2]
    assert looked == [2, 3, 0]


def test_who_shares_more_rows_is_found_whatever_hangs_on_the_other() -> None:
    bench = Bench()
    longer, shorter = bench.put([*range(8), 8, 9])[2], bench.put([*range(8), 8, 7])[2]
    hang(bench, shorter, [8, 7])
    window = samples.window(NS, shorter, [8], 8, others=[])
    assert all(result.stored for result in bench.try_put([window]))
    assert [bench.match([*range(8), 8, 9, 77])[2].key for _ in range(2)] == [longer.key] * 2
