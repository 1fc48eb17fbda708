"""Rows of the same tokens with other bits: each history is a path of its own, a look-up gives one
of them whole, and there are not too many.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from ollama_tiering.client.engine_client import EngineRefused
from ollama_tiering.protocol import calls as rpc
from ollama_tiering.protocol.engine import messages as m
from ollama_tiering.store.block.blockfile import buffer_reader, read_meta
from ollama_tiering.store.block.key import block_key, tokens_to_bytes
from ollama_tiering.store.block.pb import block_store_pb2 as pb
from ollama_tiering.store.books.histories import MOST_OF_A_TEXT
from tests.contract.fake_engine import FakeEngine, hello, prompt
from tests.sidecar import SidecarProcess


@pytest.fixture(scope="module")
def daemon(tmp_path_factory: pytest.TempPathFactory) -> Iterator[SidecarProcess]:
    with SidecarProcess(tmp_path_factory.mktemp("histories")) as running:
        yield running


@pytest.fixture
def engine(daemon: SidecarProcess) -> Iterator[FakeEngine]:
    with FakeEngine(daemon.socket) as connected:
        yield connected


def store(engine: FakeEngine, tokens: list[int], row: int, bits: bytes) -> int:
    """Rows from `row` on have other bits; how many files were filled."""
    engine.history = row, bits
    files, reasons = engine.store(tokens)
    assert reasons == []
    return len(files)


def test_rows_of_another_history_are_stored_beside_and_come_back_whole(engine: FakeEngine) -> None:
    tokens = prompt(10_000, 300)
    assert store(engine, tokens, 1 << 31, b"") == 5
    longer = [*tokens, *prompt(20_000, 200)]
    # From row 130 on it was computed otherwise, and then it went on.
    assert store(engine, longer, 130, b"b") == 6
    assert engine.restore([*longer, 1]) == 500  # compares every row with this history's
    assert store(engine, longer, 130, b"b") == 0


def test_the_longest_history_is_found_and_of_equals_the_one_used_last(engine: FakeEngine) -> None:
    tokens = prompt(30_000, 256)
    store(engine, tokens, 0, b"a")
    store(engine, tokens, 0, b"b")
    assert engine.restore([*tokens, 1]) == 256
    engine.history = 0, b"a"
    mine = engine.fingerprints(tokens)[:1]
    assert engine.restore([*tokens, 1], have=64, fingerprints=mine) == 256  # ... is used now
    assert engine.restore([*tokens, 1]) == 256
    store(engine, [*tokens, *prompt(31_000, 64)], 0, b"b")
    assert engine.restore([*tokens, *prompt(31_000, 64), 1]) == 320


def test_a_slot_goes_on_only_with_rows_of_its_own_history(engine: FakeEngine) -> None:
    tokens = prompt(40_000, 300)
    store(engine, tokens, 0, b"a")
    mine = engine.fingerprints(tokens)
    engine.history = 0, b"b"
    other = engine.fingerprints(tokens)
    asked = [*tokens, 1]
    first = [
        file.first_position for file in engine.look_up(asked, have=130, fingerprints=mine[:2]).files
    ]
    assert first == [128, 192, 256]
    # Computed otherwise, or nobody knows how: what comes takes the place of all of it.
    for fingerprints in (other[:2], (), mine[:1]):
        found = engine.look_up(asked, have=130, fingerprints=fingerprints)
        assert [file.first_position for file in found.files] == [0, 64, 128, 192, 256]
        assert found.rows == 300


def test_a_go_engine_is_told_of_the_history_that_gains_most(
    daemon: SidecarProcess, engine: FakeEngine
) -> None:
    tokens = prompt(110_000, 300)
    longer = [*tokens, *prompt(111_000, 100)]
    store(engine, tokens, 0, b"a")
    mine = list(engine.fingerprints(tokens)[:4])
    store(engine, longer, 0, b"b")
    other = list(engine.fingerprints(longer)[:6])
    namespace = namespace_of(engine, longer)
    for held, least, of in (
        ([], 0, other),
        (mine[:2], 200, mine),  # goes on from the slot's own rows
        (mine[:2], 301, other),  # of which there are not enough
        (other[:3], 400, other),
        ([bytes(8)], 0, []),  # without a bound nothing is as good
        ([bytes(8)], 1, other),  # rows that nobody has stored
    ):
        answer = has(daemon, namespace, longer, fingerprints=held, least_tokens=least)
        found = [block.fingerprint for block in answer.blocks if block.rows == 64]
        assert found == of, (len(held), least)
        parent = namespace
        for number, block in enumerate(answer.blocks[: len(of)]):
            part = tokens_to_bytes(longer[64 * number : 64 * number + 64])
            parent = block_key(parent, part, (), block.fingerprint)
            assert block.key == parent
    assert has(daemon, namespace, longer).matched_tokens == 400


def test_a_look_up_by_rows_is_counted_once(daemon: SidecarProcess, engine: FakeEngine) -> None:
    tokens = prompt(120_000, 128)
    store(engine, tokens, 0, b"a")
    namespace = namespace_of(engine, tokens)
    before = daemon.stat()
    has(daemon, namespace, tokens, fingerprints=[bytes(8)], least_tokens=65)
    after = daemon.stat()
    assert after.has_calls - before.has_calls == 1
    assert after.matched_tokens - before.matched_tokens == 128


def test_a_look_up_by_rows_tells_images_apart(daemon: SidecarProcess, engine: FakeEngine) -> None:
    tokens = prompt(130_000, 200)
    planned = engine.plan(tokens, extras=(m.EngineExtra(70, b"1" * 32),))
    filled = tuple(engine.fill(file, tokens, {}) for file in planned.files)
    assert set(engine.client.commit(m.Commit(filled)).reasons) == {""}
    namespace = namespace_of(engine, tokens[:70])
    for digest, matched in ((b"1", 200), (b"2", 70)):
        extra = pb.Extra(row=70, digest=digest * 32)
        assert has(daemon, namespace, tokens, extras=[extra]).matched_tokens == matched


def namespace_of(engine: FakeEngine, tokens: list[int]) -> bytes:
    """Of a prompt that is stored."""
    data = Path(engine.look_up([*tokens, 1]).files[0].path).read_bytes()
    return read_meta(buffer_reader(data), len(data)).namespace


def has(daemon: SidecarProcess, namespace: bytes, tokens: list[int], **said: Any) -> pb.HasResponse:
    request = pb.HasRequest(
        namespace=namespace,
        tokens=tokens_to_bytes(tokens),
        block_tokens=64,
        by_rows=True,
        **said,
    )
    with daemon.channel() as channel:
        answer: pb.HasResponse = rpc.BlockStoreStub(channel).Has(request)
    return answer


def test_more_than_what_a_slot_holds_must_be_gained(daemon: SidecarProcess) -> None:
    tokens = prompt(50_000, 200)
    with FakeEngine(daemon.socket, hello(min_tokens=64)) as engine:
        store(engine, tokens, 0, b"a")
        engine.history = 0, b"b"
        found = engine.look_up([*tokens, 1], have=180, fingerprints=engine.fingerprints(tokens)[:2])
        assert (found.rows, found.files) == (0, ())


def test_images_of_another_history_stay_apart(engine: FakeEngine) -> None:
    tokens = prompt(60_000, 200)
    seen, other = (m.EngineExtra(70, bytes([number]) * 32) for number in (1, 2))
    for bits in (b"a", b"b"):
        engine.history = 100, bits
        planned = engine.plan(tokens, extras=(seen,))
        filled = tuple(engine.fill(file, tokens, {}) for file in planned.files)
        assert set(engine.client.commit(m.Commit(filled)).reasons) == {""}
    engine.history = 100, b"b"
    assert engine.restore([*tokens, 1], extras=(seen,)) == 200
    assert engine.restore([*tokens, 1], extras=(other,)) == 70
    engine.history = 100, b"a"
    mine = engine.fingerprints(tokens)[:2]
    assert engine.restore([*tokens, 1], extras=(seen,), have=128, fingerprints=mine) == 200


def test_what_was_not_planned_is_not_stored(engine: FakeEngine) -> None:
    tokens = prompt(70_000, 64)
    engine.history = 0, b"a"
    planned = engine.plan(tokens)
    engine.history = 0, b"b"
    filled = tuple(engine.fill(file, tokens, {}) for file in planned.files)
    assert engine.client.commit(m.Commit(filled)).reasons == ("other rows than were planned",)
    assert engine.look_up([*tokens, 1]).reason == pb.SHORTFALL_NOTHING_STORED


def test_only_blocks_whose_contents_are_said_are_planned(engine: FakeEngine) -> None:
    tokens = prompt(80_000, 300)
    fingerprints = engine.fingerprints(tokens)
    for said in range(len(fingerprints)):
        planned = engine.client.plan(
            m.Plan(tokens_to_bytes(tokens), fingerprints=fingerprints[:said])
        )
        assert planned.outcome is m.EngineOutcome.FINGERPRINTS
        assert len(planned.files) == min(said, 1)
        filled = tuple(engine.fill(file, tokens, {}) for file in planned.files)
        engine.client.commit(m.Commit(filled))
    assert engine.store(tokens)[1] == []
    assert engine.restore([*tokens, 1]) == 300


@pytest.mark.parametrize(("rows", "said"), [(0, 1), (1, 2), (64, 2), (65, 3)])
def test_more_fingerprints_than_blocks_are_refused(
    daemon: SidecarProcess, rows: int, said: int
) -> None:
    request = m.Plan(tokens_to_bytes(prompt(99_000, rows)), fingerprints=(bytes(8),) * said)
    with FakeEngine(daemon.socket) as engine, pytest.raises(EngineRefused) as caught:
        engine.client.plan(request)
    assert caught.value.code is m.EngineFailure.REFUSED


def test_of_too_many_histories_the_one_used_least_recently_goes(tmp_path: Path) -> None:
    tokens, end = prompt(90_000, 128), prompt(91_000, 100)
    with SidecarProcess(tmp_path) as daemon, FakeEngine(daemon.socket) as engine:
        for number in range(3 * MOST_OF_A_TEXT):
            assert store(engine, [*tokens, *end], 64, bytes([number])) > 0
            engine.history = 64, bytes([0])  # this one is used all the time
            mine = engine.fingerprints(tokens)[:2]
            used = engine.restore([*tokens, *end, 1], have=128, fingerprints=mine)
            assert used == 228
        (namespace,) = daemon.stat().namespaces
        assert namespace.blocks == 1 + 3 * MOST_OF_A_TEXT  # the first block is all of theirs
        engine.history = 64, bytes([number])
        mine = engine.fingerprints(tokens)[:2]
        assert engine.restore([*tokens, *end, 1], have=128, fingerprints=mine) == 228
