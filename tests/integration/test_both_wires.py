"""One policy: an engine on the engine socket and one that speaks gRPC are told the same.

Each case is asked over both. The rows are those of one store; answers are compared with what is
expected, so that a rule that goes wrong in the shared code fails too.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import count
from pathlib import Path
from queue import SimpleQueue
from typing import Any

import grpc
import pytest

from ollama_tiering.protocol import calls as rpc
from ollama_tiering.protocol.engine import messages as m
from ollama_tiering.sidecar.engine.identity import identity_of
from ollama_tiering.store.block.blockfile import buffer_reader, read_meta
from ollama_tiering.store.block.key import tokens_to_bytes
from ollama_tiering.store.block.pb import block_store_pb2 as pb
from tests.contract.fake_engine import FakeEngine, hello, prompt
from tests.sidecar import SidecarProcess

MIN_TOKENS = 10
_fresh = count(1_000_000, 10_000)  # tokens that no other test has


@dataclass(frozen=True)
class Told:
    start: int  # the position of the first file
    rows: int
    reason: int
    at: int
    paths: tuple[str, ...]


@pytest.fixture(scope="module")
def daemon(tmp_path_factory: pytest.TempPathFactory) -> Iterator[SidecarProcess]:
    with SidecarProcess(tmp_path_factory.mktemp("wires")) as running:
        yield running


@pytest.fixture
def engine(daemon: SidecarProcess) -> Iterator[FakeEngine]:
    with FakeEngine(daemon.socket, hello(min_tokens=MIN_TOKENS)) as connected:
        yield connected


Ask = Callable[..., Told]


@pytest.fixture(params=["socket", "grpc"])
def ask(request: pytest.FixtureRequest, daemon: SidecarProcess, engine: FakeEngine) -> Ask:
    def over_socket(
        tokens: Sequence[int],
        have: int = 0,
        fingerprints: Sequence[bytes] = (),
        extras: Sequence[m.EngineExtra] = (),
    ) -> Told:
        found = engine.look_up(
            tokens, have=have, fingerprints=tuple(fingerprints), extras=tuple(extras)
        )
        if found.lease_id:
            engine.client.release(found.lease_id)
        start = found.files[0].first_position if found.files else 0
        paths = tuple(str(file.path) for file in found.files)
        return Told(start, found.rows, found.reason, found.at, paths)

    def over_grpc(
        tokens: Sequence[int],
        have: int = 0,
        fingerprints: Sequence[bytes] = (),
        extras: Sequence[m.EngineExtra] = (),
    ) -> Told:
        plan, files = look_up(
            daemon,
            namespace_of(daemon),
            tokens,
            memory_rows=have,
            fingerprints=fingerprints,
            extras=[pb.Extra(row=one.position, digest=one.digest) for one in extras],
        )
        paths = tuple(file.path.decode() for file in files)
        return Told(plan.start_row, plan.end_row, plan.reason, plan.at_row, paths)

    return over_socket if request.param == "socket" else over_grpc


def look_up(
    daemon: SidecarProcess, namespace: bytes, tokens: Sequence[int], **said: Any
) -> tuple[pb.LookUpPlan, list[pb.NamedFile]]:
    said = {"most_rows": max(len(tokens) - 1, 0), "min_tokens": MIN_TOKENS, **said}
    request = pb.LookUpRequest(
        namespace=namespace, tokens=tokens_to_bytes(tokens), block_tokens=64, by_rows=True, **said
    )
    with daemon.channel() as channel:
        stub = rpc.BlockStoreStub(channel)
        first, *more = stub.LookUp(request, timeout=10)
        for lease_id in {answer.lease_id for answer in more}:
            stub.Release(pb.ReleaseRequest(lease_id=lease_id))
    assert first.HasField("plan")
    assert not first.files
    assert not any(answer.HasField("plan") for answer in more)
    return first.plan, [file for answer in (first, *more) for file in answer.files]


def namespace_of(daemon: SidecarProcess) -> bytes:
    """Of all that these tests store: the name of the folder of its blocks."""
    (folder,) = (one for one in (daemon.ram_dir / "v1").iterdir() if len(one.name) == 64)
    return bytes.fromhex(folder.name)


def stored(engine: FakeEngine, tokens: list[int], row: int = 0, bits: bytes = b"a") -> list[bytes]:
    """Rows from `row` on have these bits. The fingerprints of all blocks."""
    engine.history = row, bits
    _, reasons = engine.store(tokens)
    assert reasons == []
    return list(engine.fingerprints(tokens))


def fresh(tokens: int) -> list[int]:
    return prompt(next(_fresh), tokens)


def test_what_is_stored_is_told_up_to_where_it_ends(engine: FakeEngine, ask: Ask) -> None:
    tokens = fresh(200)
    stored(engine, tokens)
    told = ask([*tokens, *fresh(50)])
    assert told == Told(0, 200, pb.SHORTFALL_ENDS, 200, told.paths)
    assert len(told.paths) == 4
    nothing = ask(fresh(100))
    assert nothing == Told(0, 0, pb.SHORTFALL_NOTHING_STORED, 0, ())


def test_the_last_token_is_always_computed(engine: FakeEngine, ask: Ask) -> None:
    tokens = fresh(128)
    stored(engine, tokens)
    told = ask(tokens)
    assert (told.rows, told.reason, told.at) == (127, pb.SHORTFALL_UNSPECIFIED, 0)


def test_where_it_goes_on_otherwise_is_told(engine: FakeEngine, ask: Ask) -> None:
    tokens = fresh(200)
    stored(engine, tokens)
    told = ask([*tokens[:150], *fresh(100)])
    assert (told.rows, told.reason, told.at) == (150, pb.SHORTFALL_DIFFERS, 150)
    assert len(told.paths) == 3


def test_little_more_than_memory_has_is_not_worth_a_restore(engine: FakeEngine, ask: Ask) -> None:
    tokens = fresh(200)
    mine = stored(engine, tokens)
    longer = [*tokens, *fresh(50)]
    assert ask(longer, have=200 - MIN_TOKENS + 1, fingerprints=mine[:2]).paths == ()
    enough = ask(longer, have=200 - MIN_TOKENS, fingerprints=mine[:2])
    assert (enough.start, enough.rows) == (128, 200)
    short = ask(longer[: 100 + MIN_TOKENS], have=100, fingerprints=mine[:1])
    assert (short.reason, short.paths) == (pb.SHORTFALL_TOO_SHORT, ())


def test_only_rows_of_ones_own_history_are_gone_on_from(engine: FakeEngine, ask: Ask) -> None:
    tokens = fresh(300)
    mine = stored(engine, tokens)
    engine.history = 0, b"b"
    other = engine.fingerprints(tokens)
    asked = [*tokens, 1]
    assert ask(asked, have=130, fingerprints=mine[:2]).start == 128
    for fingerprints in (other[:2], ()):  # computed otherwise, or nobody knows how
        told = ask(asked, have=130, fingerprints=fingerprints)
        assert (told.start, told.rows, len(told.paths)) == (0, 300, 5)


def test_the_history_that_gains_most_is_told(engine: FakeEngine, ask: Ask) -> None:
    tokens = fresh(300)
    longer = [*tokens, *fresh(100)]
    mine = stored(engine, tokens, 0, b"a")
    stored(engine, longer, 0, b"b")
    asked = [*longer, 1]
    assert ask(asked, have=130, fingerprints=mine[:2]).rows == 300  # goes on from the slot's own
    told = ask(asked, have=295, fingerprints=mine[:4])  # of which there are not enough
    assert (told.start, told.rows) == (0, 400)


def test_no_answer_mixes_two_histories(engine: FakeEngine, ask: Ask) -> None:
    tokens = fresh(300)
    stored(engine, tokens, 100, b"a")
    stored(engine, tokens, 100, b"b")
    for _ in range(2):
        parent = None
        for path in ask([*tokens, 1]).paths:
            data = Path(path).read_bytes()
            meta = read_meta(buffer_reader(data), len(data))
            assert parent in (None, meta.parent)
            parent = meta.key


def test_an_image_is_told_from_another(engine: FakeEngine, ask: Ask) -> None:
    tokens = fresh(200)
    seen, other = (m.EngineExtra(70, bytes([number]) * 32) for number in (1, 2))
    engine.history = 0, b"a"
    planned = engine.plan(tokens, extras=(seen,))
    filled = tuple(engine.fill(file, tokens, {}) for file in planned.files)
    assert set(engine.client.commit(m.Commit(filled)).reasons) == {""}
    asked = [*tokens, 1]
    assert ask(asked, extras=[seen]).rows == 200
    assert ask(asked, extras=[other]).rows == 70
    assert ask(asked).rows == 70
    # In the tail, of which the prompt has all tokens: its key says whether it has the same image.
    late = m.EngineExtra(195, bytes(32))
    planned = engine.plan(tokens, extras=(seen, late))
    filled = tuple(engine.fill(file, tokens, {}) for file in planned.files)
    assert set(engine.client.commit(m.Commit(filled)).reasons) == {""}
    assert ask(asked, extras=[seen, late]).rows == 200
    assert ask(asked, extras=[seen, m.EngineExtra(195, b"9" * 32)]).rows == 195


def test_a_look_up_counts_once(daemon: SidecarProcess, engine: FakeEngine, ask: Ask) -> None:
    tokens = fresh(128)
    stored(engine, tokens)
    ask([*tokens, 1])
    before = daemon.stat()
    ask([*tokens, 1])
    after = daemon.stat()
    assert after.has_calls - before.has_calls == 1
    assert after.matched_tokens - before.matched_tokens == 128


# Where one of them says more than the other does.


def test_who_goes_on_from_a_part_of_what_the_slot_holds(
    daemon: SidecarProcess, engine: FakeEngine
) -> None:
    """A Go engine drops the rest of its rows; llama-server gets all of them anew."""
    tokens = fresh(300)
    longer = [*tokens, *fresh(100)]
    mine = stored(engine, tokens, 0, b"a")
    stored(engine, longer, 0, b"b")
    engine.history = 0, b"c"
    strange = engine.fingerprints(tokens)
    asked = [*longer, 1]
    for fingerprints, start, rows in (
        ([mine[0]], 64, 300),  # only of its first block it is known which rows it has
        ([mine[0], strange[1]], 0, 400),
    ):
        plan, files = look_up(
            daemon, namespace_of(daemon), asked, memory_rows=130, fingerprints=fingerprints
        )
        assert (plan.start_row, plan.end_row) == (start, rows)
        assert files[0].fingerprint == (mine[1] if start else engine_b(engine, longer))
        found = engine.look_up(asked, have=130, fingerprints=tuple(fingerprints))
        assert (found.files[0].first_position, found.rows) == (0, 400)
        engine.client.release(found.lease_id)


def test_the_rest_of_what_the_slot_holds_is_another_history(engine: FakeEngine) -> None:
    """Which llama-server then gets all of anew, its first block, which is the same, among it."""
    tokens = fresh(300)
    stored(engine, tokens, 64, b"a")
    engine.history = 64, b"b"
    mixed = engine.fingerprints(tokens)[:2]
    found = engine.look_up([*tokens, 1], have=130, fingerprints=mixed)
    assert (found.files[0].first_position, found.rows) == (0, 300)
    engine.client.release(found.lease_id)


def engine_b(engine: FakeEngine, tokens: list[int]) -> bytes:
    engine.history = 0, b"b"
    return engine.fingerprints(tokens)[0]


def test_an_engine_on_the_socket_is_told_how_much_of_a_block_it_uses(engine: FakeEngine) -> None:
    tokens = fresh(128)
    stored(engine, tokens)
    found = engine.look_up(tokens)
    assert [file.used for file in found.files] == [64, 63]
    engine.client.release(found.lease_id)


def test_nobody_goes_on_within_a_span(daemon: SidecarProcess, engine: FakeEngine) -> None:
    tokens = fresh(200)
    stored(engine, tokens)
    namespace = namespace_of(daemon)
    for spans, rows, reason in (
        ([(150, 230)], 150, pb.SHORTFALL_ENDS),
        ([(150, 199)], 200, pb.SHORTFALL_ENDS),  # it ends with the last row that is stored
        ([(150, 200)], 150, pb.SHORTFALL_ENDS),  # ... with the first that is not
        ([(10, 40), (30, 210)], 10, pb.SHORTFALL_ENDS),  # they overlap
        ([(0, 300)], 0, pb.SHORTFALL_NOTHING_STORED),
    ):
        plan, files = look_up(
            daemon,
            namespace,
            [*tokens, *fresh(150)],
            spans=[pb.Span(first=first, last=last) for first, last in spans],
        )
        assert (plan.end_row, plan.reason) == (rows, reason), spans
        assert len(files) == plan.files == -(-rows // 64)


def test_the_gate_goes_by_the_speeds_that_the_engine_measured(
    daemon: SidecarProcess, engine: FakeEngine
) -> None:
    tokens = fresh(200)
    stored(engine, tokens)
    namespace = namespace_of(daemon)
    for prefill, copying, pays in (
        (0, 0, True),  # nothing is measured
        (1e12, 1e9, False),
        (10, 1e9, True),
        (10, 1e-3, False),  # copying takes longer than computing
    ):
        plan, files = look_up(
            daemon,
            namespace,
            [*tokens, 1],
            prefill_tokens_per_second=prefill,
            copy_bytes_per_second=copying,
        )
        assert (len(files) == 4, plan.reason != pb.SHORTFALL_GATE) == (pays, pays), (
            prefill,
            copying,
        )


def test_the_gate_goes_by_what_memory_lacks(daemon: SidecarProcess, engine: FakeEngine) -> None:
    tokens = fresh(200)
    mine = stored(engine, tokens)
    _, files = look_up(daemon, namespace_of(daemon), [*tokens, 1])
    rate = sum(file.file_bytes for file in files) / 1.6  # half of them take 0.8 seconds
    for memory, pays in ((0, True), (128, False)):
        plan, _ = look_up(
            daemon,
            namespace_of(daemon),
            [*tokens, 1],
            memory_rows=memory,
            fingerprints=mine[: memory // 64],
            prefill_tokens_per_second=100,  # 2 seconds for all of it, 0.72 for the rest
            copy_bytes_per_second=rate,
        )
        assert (plan.reason != pb.SHORTFALL_GATE) == pays


def test_the_plan_adds_up(daemon: SidecarProcess, engine: FakeEngine) -> None:
    tokens = fresh(300)
    mine = stored(engine, tokens)
    namespace = namespace_of(daemon)
    plan, files = look_up(
        daemon, namespace, [*tokens, 1], memory_rows=128, fingerprints=mine[:2], most_rows=290
    )
    assert (plan.start_row, plan.end_row, plan.files, plan.reason) == (128, 290, 3, 0)
    assert [file.fingerprint for file in files] == mine[2:]
    assert all(file.tier == pb.TIER_RAM for file in files)
    assert plan.own_bytes == 0
    assert 0 < plan.expected_seconds < 1


@pytest.mark.parametrize(
    "said",
    [
        {"block_tokens": 0},
        {"tokens": b"123"},
        {"memory_rows": 5, "most_rows": 4},
        {"most_rows": 101},
        {"namespace": b"short"},
        {"windows": [pb.WindowSought(child=1)]},
        {"windows": [pb.WindowSought(child=1, size=1)] * 65},
    ],
)
def test_a_look_up_that_makes_no_sense_is_refused(
    daemon: SidecarProcess, said: dict[str, Any]
) -> None:
    fine: dict[str, Any] = {
        "namespace": bytes(32),
        "tokens": tokens_to_bytes(range(100)),
        "block_tokens": 64,
        "most_rows": 99,
    }
    with daemon.channel() as channel, pytest.raises(grpc.RpcError) as refused:
        list(rpc.BlockStoreStub(channel).LookUp(pb.LookUpRequest(**{**fine, **said}), timeout=10))
    assert refused.value.code() is grpc.StatusCode.INVALID_ARGUMENT


def test_a_lease_lasts_until_it_is_released(daemon: SidecarProcess, engine: FakeEngine) -> None:
    tokens = fresh(300)
    stored(engine, tokens)
    request = pb.LookUpRequest(
        namespace=namespace_of(daemon),
        tokens=tokens_to_bytes([*tokens, 1]),
        block_tokens=64,
        by_rows=True,
        most_rows=300,
        min_tokens=1,
    )
    with daemon.channel() as channel:
        stub = rpc.BlockStoreStub(channel)
        call = stub.LookUp(request)
        plan, files = call
        assert plan.plan.files == len(files.files) == 5
        assert daemon.stat().open_leases == 1
        stub.Release(pb.ReleaseRequest(lease_id=files.lease_id))
    assert daemon.stat().open_leases == 0


Put = Callable[[Sequence[int], bool], tuple[int, list[str]]]


@pytest.fixture(params=["socket", "grpc"])
def put(request: pytest.FixtureRequest, daemon: SidecarProcess, engine: FakeEngine) -> Put:
    """Stores tokens, with other rows than it says if the second argument says so. Answers how many
    files were to be filled, and why some of them are not stored.
    """

    def over_socket(tokens: Sequence[int], lies: bool) -> tuple[int, list[str]]:
        planned = engine.plan(tokens)
        engine.history = (0, b"other") if lies else engine.history
        filled = [engine.fill(file, tokens, {}) for file in planned.files]
        reasons = engine.client.commit(m.Commit(tuple(filled))).reasons if filled else ()
        return len(filled), [reason for reason in reasons if reason]

    def over_grpc(tokens: Sequence[int], lies: bool) -> tuple[int, list[str]]:
        starts = range(0, len(tokens), 64)
        blocks = [pb.TextBlock(first_row=at, rows=min(64, len(tokens) - at)) for at in starts]
        text = pb.PutText(
            tokens=tokens_to_bytes(tokens),
            fingerprints=engine.fingerprints(tokens),
            blocks=blocks,
        )
        engine.history = (0, b"other") if lies else engine.history
        with put_stream(daemon, engine) as call:
            answers = call(pb.PutRequest(reserve=pb.PutReserve(text=text))).reserved.reservations
            ids, crcs = [], []
            for block, answer in zip(blocks, answers, strict=True):
                if answer.outcome == pb.Reservation.OUTCOME_PRESENT:
                    continue
                assert answer.outcome == pb.Reservation.OUTCOME_RESERVED
                file = m.EngineReserved(
                    reservation_id=answer.id,
                    path=answer.path.decode(),
                    file_bytes=answer.file_bytes,
                    payload_offset=answer.payload_offset,
                    first_position=block.first_row,
                    rows=block.rows,
                )
                ids.append(answer.id)
                crcs.append(engine.fill(file, tokens, {}).crcs)
            if not ids:
                return 0, []
            commit = pb.PutCommit(reservation_ids=ids, crcs=crcs)
            results = call(pb.PutRequest(commit=commit)).committed.results
            return len(ids), [result.reason for result in results if not result.stored]

    return over_socket if request.param == "socket" else over_grpc


@contextmanager
def put_stream(
    daemon: SidecarProcess, engine: FakeEngine
) -> Iterator[Callable[[pb.PutRequest], pb.PutResponse]]:
    """A stream of Put of the engine's model: one answer for each request."""
    engine.store(fresh(64))  # so that its namespace is described
    namespace = namespace_of(daemon)
    described = (daemon.ram_dir / "v1" / namespace.hex() / "namespace.json").read_text()
    fields = [pb.NamespaceField(name=n, value=v) for n, v in json.loads(described).items()]
    opened = pb.PutOpen(
        namespace=namespace,
        description=pb.Namespace(fields=fields),
        block_tokens=64,
        segments=[
            pb.Segment(
                child=shape.child,
                layer=shape.layer,
                kind=shape.kind,
                dtype=shape.dtype,
                row_bytes=shape.row_bytes,
            )
            for shape in identity_of(engine.hello).shapes
        ],
    )
    requests: SimpleQueue[pb.PutRequest | None] = SimpleQueue()
    requests.put(pb.PutRequest(open=opened))
    with daemon.channel() as channel:
        answers = rpc.BlockStoreStub(channel).Put(iter(requests.get, None), timeout=20)

        def call(request: pb.PutRequest) -> pb.PutResponse:
            requests.put(request)
            return next(answers)

        yield call
        requests.put(None)
        assert list(answers) == []


def test_what_is_stored_over_one_wire_need_not_be_over_the_other(
    engine: FakeEngine, put: Put, ask: Ask
) -> None:
    tokens = fresh(200)
    assert put(tokens, False) == (4, [])
    assert ask([*tokens, *fresh(50)]).rows == 200
    assert engine.store(tokens) == ([], []), "the socket names the blocks otherwise"
    assert put(tokens, False) == (0, [])


def test_rows_that_are_not_the_planned_ones_are_not_stored(
    engine: FakeEngine, put: Put, ask: Ask
) -> None:
    tokens = fresh(64)
    assert put(tokens, True) == (1, ["other rows than were planned"])
    assert ask([*tokens, 1]).rows == 0


def test_two_histories_of_one_text_are_stored_apart(engine: FakeEngine, put: Put, ask: Ask) -> None:
    tokens = fresh(128)
    assert put(tokens, False) == (2, [])
    engine.history = 64, b"second"
    assert put(tokens, False) == (1, []), "its first block is the same, bit for bit"
    assert ask([*tokens, 1]).rows == 128


@pytest.mark.parametrize(
    "request_",
    [
        pb.PutRequest(
            reserve=pb.PutReserve(
                offers=[pb.BlockOffer(key=bytes(32), parent=bytes(32), file_bytes=8192)],
                text=pb.PutText(),
            )
        ),
        pb.PutRequest(reserve=pb.PutReserve(text=pb.PutText(tokens=b"12345"))),
        pb.PutRequest(
            reserve=pb.PutReserve(
                text=pb.PutText(
                    tokens=bytes(400),
                    fingerprints=[bytes(8)],
                    blocks=[pb.TextBlock(first_row=64, rows=36)],
                )
            )
        ),
        pb.PutRequest(commit=pb.PutCommit(reservation_ids=[1, 2], crcs=[bytes(8)])),
        pb.PutRequest(commit=pb.PutCommit(reservation_ids=[7], crcs=[bytes(8), bytes(8)])),
    ],
    ids=["keys and a text", "half a token", "rows not known", "too few sums", "too many sums"],
)
def test_a_text_that_makes_no_sense_is_refused(
    daemon: SidecarProcess, engine: FakeEngine, request_: pb.PutRequest
) -> None:
    with pytest.raises(grpc.RpcError) as refused, put_stream(daemon, engine) as call:
        call(request_)
    assert refused.value.code() is grpc.StatusCode.INVALID_ARGUMENT


def test_checksums_of_what_was_not_reserved_are_answered(
    daemon: SidecarProcess, engine: FakeEngine
) -> None:
    with put_stream(daemon, engine) as call:
        answer = call(pb.PutRequest(commit=pb.PutCommit(reservation_ids=[77], crcs=[b"x"])))
    (result,) = answer.committed.results
    assert (result.stored, result.reason) == (False, "no such reservation")
