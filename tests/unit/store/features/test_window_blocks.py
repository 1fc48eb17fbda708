"""Window blocks hang on a chain: no prompt matches them, and they come and go with their block."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from measure.store import samples
from ollama_tiering.store.block.blockfile import buffer_reader, pack_head, read_meta
from ollama_tiering.store.block.key import BlockKey
from ollama_tiering.store.block.pb import block_store_pb2 as pb
from ollama_tiering.store.block.window_fields import end_row
from ollama_tiering.store.errors import CorruptBlock
from ollama_tiering.store.upkeep import damage
from ollama_tiering.store.values import Selection
from tests.unit.store.administration import Tools, collect
from tests.unit.store.support import FILE_BYTES, NAMESPACE, NS, Bench, keys_of

TOKENS = list(range(10))  # two whole blocks and a tail of two


@pytest.fixture
def tools(tmp_path: Path) -> Iterator[Tools]:
    made = Tools(tmp_path)
    yield made
    made.bench.store.close()


def hang(bench: Bench, blocks: list[samples.SampleBlock]) -> list[samples.SampleBlock]:
    """Stores a window that begins in the second row of the second block, and ends with the last."""
    windows = [
        samples.window(NS, block, TOKENS[4 * i : 4 * i + block.rows], 4 * i, first=int(i == 1))
        for i, block in enumerate(blocks)
        if i >= 1
    ]
    results = bench.try_put(windows)
    assert all(result.stored for result in results), results
    bench.tick()
    return windows


def test_a_window_block_says_which_cells_its_rows_lay_in() -> None:
    (block,) = samples.sequence(NS, range(4))
    window = samples.window(NS, block, range(4), 0, first=1)
    meta = read_meta(buffer_reader(window.data), len(window.data))
    assert (meta.cells, meta.rows, meta.plain_rows) == ((101, 102, 103), 3, -1)
    others = [samples.window(NS, block, range(4), 0, first=first).key for first in (0, 2)]
    assert len({block.key, window.key, *others}) == 4


@pytest.mark.parametrize(("first", "to", "ends"), [(0, 4, 4), (1, 4, 4), (1, 3, 3), (3, 4, 4)])
def test_its_name_says_at_which_row_a_window_ends(first: int, to: int, ends: int) -> None:
    (block,) = samples.sequence(NS, range(4))
    last, before = (
        samples.window(NS, block, range(to), 0, first=first, others=others) for others in ((), None)
    )
    meta = read_meta(buffer_reader(last.data), len(last.data))
    assert end_row(meta.plain_rows) == ends
    meta = read_meta(buffer_reader(before.data), len(before.data))
    assert (meta.plain_rows, end_row(meta.plain_rows)) == (-1, 0)
    assert not any(map(end_row, range(-1, 70)))


def test_fields_of_a_window_that_no_writer_makes_are_damage() -> None:
    (block,) = samples.sequence(NS, range(4))
    window = samples.window(NS, block, range(4), 0, others=[block])
    meta = read_meta(buffer_reader(window.data), len(window.data))
    assert meta.others == (block.key,)
    length = int.from_bytes(window.data[12:16], "little")

    def changed(change: Callable[[pb.BlockHeader], object]) -> bytes:
        header = pb.BlockHeader.FromString(window.data[32 : 32 + length])
        change(header)
        head = pack_head(header.SerializeToString(), meta.payload_offset)
        return head + window.data[len(head) :]

    for change, reason in (
        (lambda header: header.cells.pop(), "3 cells are not one for each of 4 rows"),
        (lambda header: header.ClearField("cells"), "without cells names"),
        (lambda header: header.window.append(b"x"), "a key in window has not 32 bytes"),
    ):
        data = changed(change)
        with pytest.raises(CorruptBlock, match=reason):
            read_meta(buffer_reader(data), len(data))


def test_no_prompt_matches_a_window_block_and_who_names_it_gets_it() -> None:
    bench = Bench()
    blocks = bench.put(TOKENS)
    before = [(one.key, one.rows) for one in bench.match([*TOKENS, 77])]
    windows = hang(bench, blocks)
    assert [(one.key, one.rows) for one in bench.match([*TOKENS, 77])] == before
    assert bench.rows([*range(8), *TOKENS[5:8]]) == 8  # the window's own tokens after its block
    lease = bench.store.lease(NAMESPACE, [window.key for window in windows])
    assert [one.key for one in lease.blocks] == [window.key for window in windows]


def test_a_window_block_without_its_block_is_not_stored() -> None:
    bench = Bench()
    blocks = samples.sequence(NS, TOKENS)
    (result,) = bench.try_put([samples.window(NS, blocks[0], TOKENS[:4], 0)])
    assert not result.stored


def test_a_block_does_not_leave_before_its_window() -> None:
    bench = Bench(ram=None, local=5)
    blocks = bench.put(TOKENS)
    windows = hang(bench, blocks)
    bench.match(TOKENS)  # the chain is used, its window is not
    bench.put([90, 91])
    assert bench.in_tier(0) & keys_of(windows) < keys_of(windows)
    assert bench.rows(TOKENS) == len(TOKENS)
    for token in range(200, 260):
        bench.put([token])
        held = bench.in_tier(0)
        for block, window in zip(blocks[1:], windows, strict=True):
            assert block.key in held or window.key not in held


def test_a_longer_tail_replaces_one_with_its_window() -> None:
    bench = Bench()
    windows = hang(bench, bench.put(TOKENS))
    bench.put([*TOKENS, 10])
    held = bench.in_tier(0)
    assert windows[0].key in held  # of the whole block
    assert windows[1].key not in held
    assert all(one.parent in bench.state.tree for one in bench.state.tree if one.window)


def test_a_tail_whose_window_is_being_read_stays() -> None:
    bench = Bench()
    windows = hang(bench, bench.put(TOKENS))
    lease = bench.lease(windows)
    bench.put([*TOKENS, 10])
    assert keys_of(windows) <= bench.in_tier(0)
    bench.store.release(lease)


def test_a_conversation_is_one_with_its_window(tools: Tools) -> None:
    blocks = tools.put(TOKENS)
    windows = hang(tools.bench, blocks)
    tools.bench.store.run_pending()
    (line,) = tools.chains()
    assert line.key == blocks[-1].key
    assert (line.tokens, line.blocks, line.file_bytes) == (10, 5, 5 * FILE_BYTES)
    assert (line.own_blocks, line.own_bytes) == (3, 5 * FILE_BYTES)
    totals = tools.admin.listing().stored
    assert (totals.chains, totals.blocks) == (1, 5)
    tokens = {one.key: one.tokens for one in tools.admin.listing(blocks=True).blocks}
    assert [tokens[window.key] for window in windows] == [8, 10]
    assert tools.chains(ids=(windows[1].key.hex(),)) == [line]
    planned = tools.admin.remove(Selection(), dry_run=True)
    done = tools.admin.remove(Selection(), dry_run=False)
    assert planned == done
    assert (done.chains, done.blocks, done.kept) == (1, 5, {})
    assert not any(tools.file("ram", one.key).exists() for one in (*blocks, *windows))
    assert not list(tools.bench.state.tree)


def test_the_tools_find_nothing_wrong_with_a_window(tools: Tools) -> None:
    blocks = tools.put(TOKENS)
    hang(tools.bench, blocks)
    tools.bench.store.run_pending()
    assert tools.verify() == []
    assert collect(tools) == {}
    tools.admin.pin(blocks[-1].key.hex())
    assert tools.admin.listing().chains[0].pinned


def test_a_window_is_taken_from_the_one_conversation_only(tools: Tools) -> None:
    one = tools.put(TOKENS)
    windows = hang(tools.bench, one)
    two = tools.put([*range(8), 60, 61])
    done = tools.admin.remove(Selection(ids=(one[-1].key.hex(),)), dry_run=False)
    assert done.kept == {"needed by another chain": 2}
    left = {record.key for record in tools.bench.state.tree}
    assert left == keys_of(two) | {windows[0].key}


def test_a_sequence_that_is_removed_takes_its_window_along() -> None:
    bench = Bench()
    blocks = bench.put(TOKENS)
    hang(bench, blocks)
    bench.store.remove_seq(NAMESPACE, [block.key for block in blocks])
    assert not bench.in_tier(0)


def test_a_restart_knows_windows_for_what_they_are(tmp_path: Path) -> None:
    tools = Tools(tmp_path)
    windows = hang(tools.bench, tools.put(TOKENS))
    tools.bench.store.run_pending()
    for index in (True, False):
        tools.bench.store.close()
        if not index:
            for file in (tmp_path / "local").glob("index.sqlite*"):
                file.unlink()
        tools = Tools(tmp_path)
        known = {record.key for record in tools.bench.state.tree if record.window}
        assert known == keys_of(windows)
        assert tools.bench.rows([*TOKENS, 5]) == len(TOKENS)
    tools.bench.store.close()


def test_a_restart_knows_where_windows_end(tmp_path: Path) -> None:
    tools = Tools(tmp_path)
    _, last = hang_whole(tools.bench)
    tools.bench.store.run_pending()
    for index in (True, False):
        tools.bench.store.close()
        if not index:
            for file in (tmp_path / "local").glob("index.sqlite*"):
                file.unlink()
        tools = Tools(tmp_path)
        tree = tools.bench.state.tree
        record = tree.get(last.key)
        assert record is not None
        assert [tree.windows_ending(record.parent, rows) for rows in range(4)] == [0, 0, 1, 1]
    tools.bench.store.close()


def test_removed_is_what_is_its_own_and_what_is_shared_keeps_its_windows(tools: Tools) -> None:
    """Three begin with the same two blocks; two of them go on together for one more."""
    together = [*range(8), 30, 31, 32, 33]
    one, two = tools.put([*together, 1]), tools.put([*together, 2])
    three = tools.put([*range(8), 60, 61])
    parts = [range(4), range(4, 8), range(30, 34), [1]]
    on_one = [
        samples.window(NS, block, list(part), 4 * at)
        for at, (block, part) in enumerate(zip(one, parts, strict=True))
    ]
    on_two = samples.window(NS, two[-1], [2], 12)
    on_three = samples.state(NS, three[2], 61, 8, row=1, row_bytes=64)
    put = [*on_one, on_two, on_three]
    assert all(result.stored for result in tools.bench.try_put(put))
    tools.bench.store.run_pending()

    def left() -> set[bytes]:
        return {record.key for record in tools.bench.state.tree if record.window}

    def remove(blocks: list[samples.SampleBlock]) -> int:
        selection = Selection(ids=(blocks[-1].key.hex(),))
        planned = tools.admin.remove(selection, dry_run=True)
        done = tools.admin.remove(selection, dry_run=False)
        assert planned == done
        return done.blocks

    assert remove(one) == 2
    assert left() == keys_of([*on_one[:3], on_two, on_three])
    assert remove(two) == 4
    assert left() == keys_of([*on_one[:2], on_three])
    assert remove(three) == 6
    assert not list(tools.bench.state.tree)
    assert not list(tools.root.rglob("*.kvb*"))


def test_what_a_sequence_shares_with_another_keeps_its_windows() -> None:
    bench = Bench()
    blocks = bench.put(TOKENS)
    windows = hang(bench, blocks)
    other = bench.put([*range(4), 70])
    shared = samples.window(NS, blocks[0], TOKENS[:4], 0)
    bench.try_put([shared])
    removed, _ = bench.store.remove_seq(NAMESPACE, [block.key for block in blocks])
    assert removed == 4
    assert bench.in_tier(0) == keys_of([blocks[0], other[-1], shared])
    assert not any(window.key in bench.state.tree for window in windows)


def test_from_a_position_on_windows_go_with_their_blocks() -> None:
    bench = Bench()
    blocks = bench.put(TOKENS)
    windows = hang(bench, blocks)
    bench.store.remove_seq(NAMESPACE, [block.key for block in blocks[2:]])
    assert bench.in_tier(0) == keys_of([*blocks[:2], windows[0]])


def orphaned(tools: Tools) -> samples.SampleBlock:
    """A window block whose block was damaged, and is put aside."""
    blocks = tools.put(TOKENS[:4])
    window = samples.window(NS, blocks[0], TOKENS[:4], 0)
    assert tools.bench.try_put([window])[0].stored
    tools.bench.store.run_pending()
    for tier in ("ram", "local"):
        tools.flip(tools.file(tier, blocks[0].key), 4100)
    assert tools.bench.store.report_corrupt(NAMESPACE, blocks[0].key)
    assert {record.key for record in tools.bench.state.tree} == {window.key}
    return window


def test_a_window_whose_block_is_gone_can_be_removed(tools: Tools) -> None:
    window = orphaned(tools)
    (line,) = tools.chains()
    assert (line.key, line.complete, line.own_blocks) == (window.key, False, 1)
    assert tools.admin.remove(Selection(), dry_run=False).blocks == 1
    assert not list(tools.root.rglob("*.kvb*"))


def test_a_window_whose_block_is_gone_is_collected(tools: Tools) -> None:
    orphaned(tools)
    assert collect(tools)["unreachable"][0] == 1
    assert not list(tools.bench.state.tree)


def test_a_rule_that_forbids_the_model_takes_a_window_whose_block_is_gone(tools: Tools) -> None:
    orphaned(tools)
    terms = replace(tools.bench.state.terms.unknown, refusal="a rule", remove=True)
    tools.bench.store.set_terms(lambda _: terms)
    tools.bench.store.run_pending()
    assert not list(tools.bench.state.tree)


def hang_whole(bench: Bench) -> tuple[samples.SampleBlock, samples.SampleBlock]:
    """A window of two blocks; the second names the first."""
    blocks = bench.put(TOKENS)
    before = samples.window(NS, blocks[1], TOKENS[4:8], 4, first=1)
    last = samples.window(NS, blocks[2], TOKENS[8:], 8, others=[before])
    assert all(result.stored for result in bench.try_put([before, last]))
    bench.tick()
    return before, last


def lose(bench: Bench, block: samples.SampleBlock) -> None:
    with bench.state.lock:
        record = bench.state.tree.get(block.key)
        assert record is not None
        for index in sorted(record.levels):
            doomed = bench.state.drop_copy(bench.state.levels[index], block.key)
            assert doomed is not None
            bench.state.gone(doomed, unlinked=True)


def test_a_reported_window_whose_other_blocks_are_gone_is_dropped_and_stored_anew() -> None:
    bench = Bench()
    before, last = hang_whole(bench)
    lose(bench, before)
    assert bench.store.report_corrupt(NAMESPACE, last.key)
    assert last.key not in bench.in_tier(0)
    assert not any(level.stats.quarantined_blocks for level in bench.state.levels)
    assert all(result.stored for result in bench.try_put([before, last]))
    assert keys_of([before, last]) <= bench.in_tier(0)


def test_a_reported_window_that_is_whole_stays() -> None:
    bench = Bench()
    before, last = hang_whole(bench)
    assert not bench.store.report_corrupt(NAMESPACE, last.key)
    assert not bench.store.report_corrupt(NAMESPACE, before.key)
    assert keys_of([before, last]) <= bench.in_tier(0)


def test_a_parted_window_that_is_read_is_not_dropped() -> None:
    bench = Bench()
    before, last = hang_whole(bench)
    lose(bench, before)
    lease = bench.lease([last])
    assert not bench.store.report_corrupt(NAMESPACE, last.key)
    bench.store.release(lease)
    assert bench.store.report_corrupt(NAMESPACE, last.key)


def test_a_block_that_comes_while_its_window_is_looked_at_is_not_missing(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    bench = Bench()
    before, last = hang_whole(bench)
    lose(bench, before)
    names = damage._names

    def slow(*of: Any) -> tuple[BlockKey, ...]:
        found = names(*of)
        assert all(result.stored for result in bench.try_put([before]))
        return found

    monkeypatch.setattr(damage, "_names", slow)
    assert not bench.store.report_corrupt(NAMESPACE, last.key)
    assert keys_of([before, last]) <= bench.in_tier(0)


def test_a_block_that_is_being_written_is_not_missing() -> None:
    bench = Bench()
    before, last = hang_whole(bench)
    lose(bench, before)
    (reserved,) = bench.reserve([before])
    assert not bench.store.report_corrupt(NAMESPACE, last.key)
    bench.fill(reserved, before.data)
    assert bench.session.commit([reserved.reservation_id])[0].stored
    assert keys_of([before, last]) <= bench.in_tier(0)
    lose(bench, before)
    assert bench.store.report_corrupt(NAMESPACE, last.key)


def test_names_are_looked_at_before_all_bytes_are_read(monkeypatch: pytest.MonkeyPatch) -> None:
    bench = Bench()
    before, last = hang_whole(bench)
    lose(bench, before)

    def refuse(*of: Any) -> bool:
        raise AssertionError("read it all")

    monkeypatch.setattr(damage, "_damaged", refuse)
    assert bench.store.report_corrupt(NAMESPACE, last.key)


def test_a_damaged_end_of_a_window_that_is_whole_is_quarantined() -> None:
    bench = Bench(local=None)
    _, last = hang_whole(bench)
    bench.damage(0, last.key, len(last.data) - 4096)
    assert bench.store.report_corrupt(NAMESPACE, last.key)
    assert [level.stats.quarantined_blocks for level in bench.state.levels] == [1]


def test_while_a_tier_is_not_known_no_window_counts_as_parted() -> None:
    bench = Bench()
    before, last = hang_whole(bench)
    lose(bench, before)
    bench.state.levels[-1].surveyed = False
    assert not bench.store.report_corrupt(NAMESPACE, last.key)
    bench.state.levels[-1].surveyed = True
    assert bench.store.report_corrupt(NAMESPACE, last.key)


def test_a_parted_window_of_a_pinned_chain_comes_anew_and_is_pinned_again() -> None:
    bench = Bench()
    before, last = hang_whole(bench)
    bench.store.pins.pin(last.parent)
    pinned_bytes = bench.store.pins.pinned_bytes()
    lose(bench, before)
    assert bench.store.report_corrupt(NAMESPACE, last.key)
    assert bench.store.pins.pinned_bytes() == pinned_bytes - 2 * FILE_BYTES
    assert all(result.stored for result in bench.try_put([before, last]))
    bench.store.run_pending()
    assert bench.store.pins.pinned_bytes() == pinned_bytes
