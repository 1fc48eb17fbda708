"""An unlink that was decided on before does not take a file that came under the same name since."""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from ollama_tiering.store.block.key import BlockKey
from ollama_tiering.store.books import copies
from ollama_tiering.store.books.found import FileIs, compare, enter
from ollama_tiering.store.books.policy import StorePolicy
from ollama_tiering.store.serving.session import BlockOffer, Outcome, WriteSession
from ollama_tiering.store.tiers.contract import StoredBlock
from ollama_tiering.store.tiers.memory import MemoryTier
from ollama_tiering.store.upkeep import chain_check, making_room, unlinking
from tests.unit.store.encoded import BLOCK_TOKENS, NAMESPACE, NS, RAW_BYTES, EncodedBench
from tests.unit.store.support import Bench

_SOON = 0.2  # long enough for another thread to do what it can do now


class HeldUnlinks:
    """Of one tier: each stops before its file goes, until it is let go."""

    def __init__(self, tier: MemoryTier, monkeypatch: pytest.MonkeyPatch) -> None:
        self.reached = threading.Event()
        self.let_go = threading.Event()
        remove = tier.remove

        def held(namespace: Any, key: Any) -> None:
            self.reached.set()
            assert self.let_go.wait(10)
            remove(namespace, key)

        monkeypatch.setattr(tier, "remove", held)


@contextlib.contextmanager
def in_thread(work: Callable[[], object]) -> Iterator[threading.Thread]:
    thread = threading.Thread(target=work)
    thread.start()
    yield thread
    thread.join(10)
    assert not thread.is_alive()


def _books_are_right(bench: EncodedBench, key: BlockKey) -> None:
    record = bench.state.tree.get(key)
    assert record is not None
    for level, tier in zip(bench.state.levels, (bench.ram, bench.local), strict=True):
        assert (level.index in record.levels) == ((NAMESPACE, key) in tier.blocks)
    assert not bench.state.leaving


def _trim(bench: EncodedBench) -> None:
    bench.store._mover.set_watermarks(0.1, 0.0)
    bench.store._mover.trim()


def _shrink(bench: EncodedBench) -> None:
    bench.state.levels[0].lru.budget_bytes = 0
    making_room.shrink(bench.state, bench.state.levels[0])
    bench.state.levels[0].lru.budget_bytes = 4 * RAW_BYTES


def _free(bench: EncodedBench) -> None:
    making_room.free_bytes(bench.state, bench.state.levels[0], RAW_BYTES)


def _expire(bench: EncodedBench) -> None:
    bench.store._mover._expiry._drop(bench.state, bench.state.levels[0], time.time() + 1e9, 1.0)


def _remove_what_covers(bench: EncodedBench) -> None:
    """As a person's `rm`, or the end of a sequence, of this tier only."""
    with bench.state.lock:
        keys = list(bench.state.levels[0].lru)
        doomed = [bench.state.drop_copy(bench.state.levels[0], key) for key in keys]
    unlinking.unlink(bench.state, [one for one in doomed if one])


@pytest.mark.parametrize("evict", [_trim, _shrink, _free, _expire, _remove_what_covers])
def test_a_block_that_is_staged_meanwhile_stays(
    evict: Callable[[EncodedBench], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    bench = EncodedBench(policy=StorePolicy(ttl_seconds=1.0))
    key, data = bench.put(1)
    bench.store.run_pending()
    unlinks = HeldUnlinks(bench.ram, monkeypatch)
    leased: list[Any] = []
    with in_thread(lambda: evict(bench)):
        assert unlinks.reached.wait(10)
        with in_thread(lambda: leased.append(bench.store.lease(NAMESPACE, [key]))) as client:
            client.join(_SOON)
            unlinks.let_go.set()
    ((block,),) = (one.blocks for one in leased)
    assert bench.store.read_part(block, 0, block.file_bytes) == data
    _books_are_right(bench, key)


def test_a_block_is_not_promoted_into_the_place_of_one_that_goes(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    bench = EncodedBench()
    key, _ = bench.put(1)
    bench.store.run_pending()
    record = bench.state.tree.get(key)
    assert record is not None
    unlinks = HeldUnlinks(bench.ram, monkeypatch)
    ram, local = bench.state.levels
    with in_thread(lambda: _free(bench)):
        assert unlinks.reached.wait(10)
        with (
            copies.held(bench.state, key),
            in_thread(lambda: bench.store._mover.copy(record, local, ram)) as promoter,
        ):
            promoter.join(_SOON)
            unlinks.let_go.set()
    _books_are_right(bench, key)


def test_a_name_that_does_not_get_free_is_given_up(monkeypatch: pytest.MonkeyPatch) -> None:
    bench = EncodedBench()
    key, _ = bench.put(1)
    bench.store.run_pending()
    monkeypatch.setattr(unlinking, "_WAIT_SECONDS", 0.05)
    unlinks = HeldUnlinks(bench.ram, monkeypatch)
    with in_thread(lambda: _free(bench)):
        assert unlinks.reached.wait(10)
        assert bench.store.lease(NAMESPACE, [key]).blocks == []
        unlinks.let_go.set()
    _books_are_right(bench, key)
    assert len(bench.store.lease(NAMESPACE, [key]).blocks) == 1


def test_a_writer_does_not_begin_while_any_file_of_the_name_goes(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Also where the last other copy was lost in between, so that no tier has the block."""
    bench = EncodedBench()
    key, data = bench.put(1)
    bench.store.run_pending()
    unlinks = HeldUnlinks(bench.ram, monkeypatch)
    offer = BlockOffer(key, NAMESPACE, len(data))
    session = _session(bench)
    with in_thread(lambda: _free(bench)):
        assert unlinks.reached.wait(10)
        bench.local.blocks.clear()
        copies.forget(bench.state, bench.state.levels[1], key)
        assert bench.state.tree.get(key) is None
        assert session.reserve([offer])[0].outcome is Outcome.NO_ROOM
        unlinks.let_go.set()
    assert session.reserve([offer])[0].outcome is Outcome.RESERVED


@pytest.mark.parametrize("inline", [False, True], ids=["reserved", "inline"])
def test_a_writer_waits_until_the_name_is_free(
    monkeypatch: pytest.MonkeyPatch, inline: bool
) -> None:
    """An engine's, and one that imports an archive."""
    bench = EncodedBench()
    key, data = bench.put(1)
    unlinks = HeldUnlinks(bench.ram, monkeypatch)
    session = _session(bench)
    bench.state.unsaved.discard(key)  # so that it may be evicted

    def write() -> None:
        if inline:
            done = session.put_inline(key, data, last=True)
            assert done is not None
            assert done.stored
            return
        (answer,) = session.reserve([BlockOffer(key, NAMESPACE, len(data))])
        assert answer.outcome is Outcome.RESERVED
        session._pending[answer.reservation_id].temp.write_at(0, data)
        assert session.commit([answer.reservation_id])[0].stored

    monkeypatch.setattr(chain_check, "OFFER_SECONDS", 10.0)
    with in_thread(lambda: _free(bench)):
        assert unlinks.reached.wait(10)
        with in_thread(write) as writer:
            writer.join(_SOON)
            assert (NAMESPACE, key) in bench.ram.blocks  # the old one: nothing was named
            unlinks.let_go.set()
    assert bench.ram.blocks[NAMESPACE, key] == data
    _books_are_right(bench, key)


def test_what_a_writer_fills_is_not_staged_over_it() -> None:
    """The tier that had it was away when the writer began, and is back."""
    bench = EncodedBench()
    key, data = bench.put(1)
    bench.reboot()
    record = bench.state.tree.get(key)
    assert record is not None
    session = _session(bench)
    away = bench.state.resting
    bench.state.resting = lambda: [1]  # type: ignore[method-assign]
    (answer,) = session.reserve([BlockOffer(key, NAMESPACE, len(data))])
    bench.state.resting = away  # type: ignore[method-assign]
    assert answer.outcome is Outcome.RESERVED
    assert bench.store.lease(NAMESPACE, [key]).blocks == []
    session._pending[answer.reservation_id].temp.write_at(0, data)
    assert session.commit([answer.reservation_id])[0].stored
    assert len(bench.store.lease(NAMESPACE, [key]).blocks) == 1
    _books_are_right(bench, key)


def test_a_file_that_goes_is_not_found_again_by_a_survey(monkeypatch: pytest.MonkeyPatch) -> None:
    bench = EncodedBench()
    key, _ = bench.put(1)
    bench.store.run_pending()
    record = bench.state.tree.get(key)
    assert record is not None
    unlinks = HeldUnlinks(bench.ram, monkeypatch)
    ram, local = bench.state.levels
    with in_thread(lambda: _free(bench)):
        assert unlinks.reached.wait(10)
        here, there = (
            StoredBlock(NAMESPACE, key, len(tier.blocks[NAMESPACE, key]), RAW_BYTES, 0.0)
            for tier in (bench.ram, bench.local)
        )
        assert compare(bench.state, ram, here, set()) is FileIs.LEAVING
        assert compare(bench.state, local, there, set()) is FileIs.KNOWN
        enter(bench.state, ram, here, record, stays=False)
        assert ram.index not in record.levels
        unlinks.let_go.set()
    _books_are_right(bench, key)


def test_what_a_writer_began_is_held_until_it_is_done() -> None:
    bench = Bench()
    blocks = bench.put(range(4))
    assert not bench.state.held(blocks[0].key)
    assert not any(level.lru._holds for level in bench.state.levels)
    (again,) = bench.reserve([blocks[0]])
    assert again.outcome is Outcome.PRESENT
    bench.session.close()
    assert not any(level.lru._holds for level in bench.state.levels)


def _session(bench: EncodedBench) -> WriteSession:
    return bench.store.open_session(NAMESPACE, NS.fields(), BLOCK_TOKENS)
