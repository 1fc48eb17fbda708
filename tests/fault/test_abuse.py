"""A client that asks for too much or takes too long: refused or cut off, the others are served."""

from __future__ import annotations

import contextlib
import os
import socket
import time
from collections.abc import Iterator
from pathlib import Path

import grpc
import pytest

from measure.store import samples
from ollama_tiering.protocol import calls as rpc
from ollama_tiering.sidecar.bounds import MAX_INLINE_GETS, MAX_PUT_STREAMS
from ollama_tiering.sidecar.peer import MAX_CONNECTIONS
from ollama_tiering.store.block.description import MAX_TEXT_BYTES
from ollama_tiering.store.block.pb import block_store_pb2 as pb
from ollama_tiering.store.books.admission import MAX_RESERVATIONS, MAX_WRITER_RESERVATIONS
from ollama_tiering.store.books.leases import MAX_LEASES
from tests.fault.abuse import (
    NS,
    WIDE,
    Hits,
    Watched,
    made_up_offers,
    status_of,
    store,
)
from tests.fault.relay import dammed, trickling
from tests.sidecar import PutStream, SidecarProcess
from tests.vectors import make

pytestmark = pytest.mark.fault

MIB = 1 << 20
SMALLEST_BYTES = 8192  # of a block file
WIDE_TOKENS = list(range(40))
DEADLINE_SECONDS = 1.5  # of leases and reservations here
HUGE = (1 << 63, (1 << 64) - 1, (1 << 63) - 4096, 1 << 62)


@pytest.fixture
def daemon(tmp_path: Path) -> Iterator[SidecarProcess]:
    impatient = {"lease_seconds": DEADLINE_SECONDS, "reserve_seconds": DEADLINE_SECONDS}
    with SidecarProcess(tmp_path, ram_gb=0.3, settings=impatient) as running:
        yield running
    assert "Traceback" not in running.log, running.log


@pytest.fixture
def patient(tmp_path: Path) -> Iterator[SidecarProcess]:
    with SidecarProcess(tmp_path, ram_gb=0.3) as running:
        yield running
    assert "Traceback" not in running.log, running.log


def physical_bytes(directory: Path) -> int:
    return sum(path.lstat().st_blocks * 512 for path in (directory, *directory.rglob("*")))


def nothing_reserved(daemon: SidecarProcess, seconds: float = 15.0) -> None:
    """Waits: what a start measures with is reserved for a moment, too."""
    daemon.wait(lambda stat: stat.tiers[0].reserved_bytes == 0, "nothing is reserved", seconds)


# --- reservations -------------------------------------------------------------------------------


def test_ten_thousand_reservations_of_one_client_are_bounded(patient: SidecarProcess) -> None:
    hits = Hits(patient)
    usual = hits.median_seconds()
    watched = Watched(patient)
    with patient.channel() as channel:
        greedy = PutStream(rpc.BlockStoreStub(channel), NS)
        offers = made_up_offers(10_000, SMALLEST_BYTES)
        outcomes = [
            one.outcome
            for start in range(0, len(offers), 1000)
            for one in greedy.call(
                reserve=pb.PutReserve(offers=offers[start : start + 1000])
            ).reserved.reservations
        ]
        assert outcomes[:MAX_WRITER_RESERVATIONS] == [pb.Reservation.OUTCOME_RESERVED] * 4096
        assert set(outcomes[MAX_WRITER_RESERVATIONS:]) == {pb.Reservation.OUTCOME_NO_ROOM}
        ram = patient.stat().tiers[0]
        assert ram.used_bytes + ram.reserved_bytes <= ram.budget_bytes
        assert physical_bytes(patient.ram_dir) <= ram.budget_bytes
        assert watched.grown_bytes < 32 * MIB
        assert watched.more_descriptors < 16
        assert watched.lines("reservation refused: ") == 1
        assert patient.stat().not_written["too many reservations"] >= 1
        assert hits.median_seconds() < 2 * usual + 0.001
        store(patient, WIDE, [1, 2, 3, 4])  # another client writes
        greedy.answers.cancel()
    nothing_reserved(patient, 60)
    assert not [*patient.root.rglob("*.tmp")]
    hits.close()


def test_ten_thousand_reservations_of_many_clients_are_bounded(patient: SidecarProcess) -> None:
    hits = Hits(patient)
    usual = hits.median_seconds()
    watched = Watched(patient)
    outcomes = []
    with contextlib.ExitStack() as held:
        streams = []
        for number in range(40):
            channel = held.enter_context(patient.channel())
            streams.append(PutStream(rpc.BlockStoreStub(channel), NS))
            offers = made_up_offers(250, SMALLEST_BYTES, mark=number + 1)
            answer = streams[-1].call(reserve=pb.PutReserve(offers=offers)).reserved
            outcomes += [one.outcome for one in answer.reservations]
        assert outcomes[:MAX_RESERVATIONS] == [pb.Reservation.OUTCOME_RESERVED] * 8192
        assert set(outcomes[MAX_RESERVATIONS:]) == {pb.Reservation.OUTCOME_NO_ROOM}
        ram = patient.stat().tiers[0]
        assert ram.used_bytes + ram.reserved_bytes <= ram.budget_bytes
        assert physical_bytes(patient.ram_dir) <= ram.budget_bytes
        assert watched.grown_bytes < 64 * MIB
        assert watched.more_descriptors < 40 + 16
        assert watched.lines("reservation refused: ") == 1
        assert hits.median_seconds() < 2 * usual + 0.001
        for stream in streams:
            stream.answers.cancel()
        nothing_reserved(patient, 60)
        store(patient, NS, [500, 501])
    hits.close()


def test_reservations_end_though_their_stream_is_open(daemon: SidecarProcess) -> None:
    with daemon.channel() as channel:
        stream = PutStream(rpc.BlockStoreStub(channel), NS)
        offers = made_up_offers(1000, SMALLEST_BYTES)
        stream.call(reserve=pb.PutReserve(offers=offers))
        end = time.monotonic() + 60
        while daemon.stat().tiers[0].reserved_bytes:
            assert time.monotonic() < end
            assert len(stream.commit([0])) == 1  # not silent
            time.sleep(DEADLINE_SECONDS / 10)
        assert not [*daemon.root.rglob("*.tmp")]


@pytest.mark.parametrize("file_bytes", HUGE)
def test_an_offer_of_impossible_size_is_refused_with_one_line(
    patient: SidecarProcess, file_bytes: int
) -> None:
    watched = Watched(patient)
    with patient.channel() as channel:
        for _ in range(20):
            stream = PutStream(rpc.BlockStoreStub(channel), NS)
            offers = made_up_offers(1, file_bytes)
            stream.outgoing.put(pb.PutRequest(reserve=pb.PutReserve(offers=offers)))
            assert status_of(stream.answers) is grpc.StatusCode.INVALID_ARGUMENT
        assert watched.lines("call refused: call=Put status=INVALID_ARGUMENT") == 1
        nothing_reserved(patient)
    assert not [*patient.root.rglob("*.tmp")]


def test_a_header_that_claims_impossible_sizes_is_refused(patient: SidecarProcess) -> None:
    blocks = make.blocks()
    for name in ("segment-offset-huge", "header-longer-than-allowed", "too-many-rows"):
        with patient.channel() as channel:
            stream = PutStream(rpc.BlockStoreStub(channel), NS)
            inline = pb.PutInline(key=bytes(32), part=blocks[name], last=True)
            stream.outgoing.put(pb.PutRequest(inline=inline))
            assert status_of(stream.answers) is grpc.StatusCode.INVALID_ARGUMENT
    nothing_reserved(patient)


def test_numbers_at_the_edge_are_unknown_and_no_more(patient: SidecarProcess) -> None:
    most = (1 << 64) - 1
    with patient.channel() as channel:
        stub = rpc.BlockStoreStub(channel)
        stub.Release(pb.ReleaseRequest(lease_id=most), timeout=10)
        stream = PutStream(stub, NS)
        assert [result.stored for result in stream.commit([most, 1 << 63, 0])] == [False] * 3
        stream.close()


def test_a_message_may_name_only_so_many_things(patient: SidecarProcess) -> None:
    invalid = grpc.StatusCode.INVALID_ARGUMENT
    too_many = (1 << 16) + 1
    with patient.channel() as channel:
        stub = rpc.BlockStoreStub(channel)
        get = pb.GetRequest(namespace=NS.digest(), keys=[bytes(32)] * too_many)
        assert status_of(stub.Get(get, timeout=30)) is invalid
        for request in (
            pb.PutRequest(commit=pb.PutCommit(reservation_ids=[1] * too_many)),
            pb.PutRequest(reserve=pb.PutReserve(offers=made_up_offers(too_many, SMALLEST_BYTES))),
        ):
            stream = PutStream(stub, NS)
            stream.outgoing.put(request)
            assert status_of(stream.answers) is invalid


# --- slow clients -------------------------------------------------------------------------------


def test_a_stream_that_stores_nothing_is_ended(daemon: SidecarProcess) -> None:
    watched = Watched(daemon)
    with daemon.channel() as channel:
        silent = [PutStream(rpc.BlockStoreStub(channel), NS) for _ in range(5)]
        start = time.monotonic()
        for stream in silent:
            assert status_of(stream.answers) is grpc.StatusCode.DEADLINE_EXCEEDED
        assert DEADLINE_SECONDS * 0.9 < time.monotonic() - start < 5 * DEADLINE_SECONDS
    assert watched.lines("call refused: call=Put status=DEADLINE_EXCEEDED") == 1


def test_half_a_block_gives_its_room_back(daemon: SidecarProcess) -> None:
    (block,) = samples.sequence(WIDE, [1, 2, 3, 4])
    with daemon.channel() as channel:
        stream = PutStream(rpc.BlockStoreStub(channel), WIDE)
        half = pb.PutInline(key=block.key, part=block.data[:MIB])
        stream.outgoing.put(pb.PutRequest(inline=half))
        daemon.wait(lambda stat: stat.tiers[0].reserved_bytes > 0, "it is reserved")
        assert status_of(stream.answers) is grpc.StatusCode.DEADLINE_EXCEEDED
        nothing_reserved(daemon)
    assert not [*daemon.root.rglob("*.tmp")]
    store(daemon, WIDE, [1, 2, 3, 4])  # nobody writes it any more


def test_a_block_that_comes_byte_by_byte_is_given_up(daemon: SidecarProcess) -> None:
    (block,) = samples.sequence(NS, [1, 2, 3, 4])
    with daemon.channel() as channel:
        stream = PutStream(rpc.BlockStoreStub(channel), NS)
        first = pb.PutInline(key=block.key, part=block.data[:8000])
        stream.outgoing.put(pb.PutRequest(inline=first))
        start = time.monotonic()
        for at in range(8000, len(block.data)):
            part = pb.PutInline(key=block.key, part=block.data[at : at + 1])
            stream.outgoing.put(pb.PutRequest(inline=part))
            time.sleep(DEADLINE_SECONDS / 10)
            if stream.answers.done():
                break
        assert time.monotonic() - start < 3 * DEADLINE_SECONDS
        assert status_of(stream.answers) is grpc.StatusCode.INVALID_ARGUMENT
    nothing_reserved(daemon)


def test_a_client_that_stops_reading_loses_its_lease_and_no_one_else_is_slower(
    daemon: SidecarProcess, tmp_path: Path
) -> None:
    hits = Hits(daemon)
    blocks = store(daemon, WIDE, WIDE_TOKENS)
    request = pb.GetRequest(namespace=WIDE.digest(), keys=[b.key for b in blocks], inline=True)
    usual = hits.median_seconds()
    watched = Watched(daemon)
    path = tmp_path / "stopped"
    with dammed(daemon, path, first_bytes=1024) as opened, contextlib.ExitStack() as held:
        stalled = []
        for _ in range(2 * MAX_INLINE_GETS):
            own = (("grpc.use_local_subchannel_pool", 1),)  # a connection of its own
            channel = held.enter_context(grpc.insecure_channel(f"unix:{path}", options=own))
            stalled.append(rpc.BlockStoreStub(channel).Get(request))
        daemon.wait(lambda stat: stat.open_leases == MAX_INLINE_GETS, "so many have begun")
        assert hits.median_seconds() < 2 * usual + 0.001
        daemon.wait(lambda stat: stat.open_leases == 0, "the leases are over")
        time.sleep(DEADLINE_SECONDS)
        assert watched.grown_bytes < MAX_INLINE_GETS * 8 * MIB
        opened.set()
        codes = [status_of(call) for call in stalled]
        assert codes.count(grpc.StatusCode.DEADLINE_EXCEEDED) == MAX_INLINE_GETS
        assert codes.count(grpc.StatusCode.RESOURCE_EXHAUSTED) == MAX_INLINE_GETS
    for status in ("DEADLINE_EXCEEDED", "RESOURCE_EXHAUSTED"):
        assert watched.lines(f"call refused: call=Get status={status}") == 1
    with daemon.channel() as channel:  # the places are free again
        answers = rpc.BlockStoreStub(channel).Get(request, timeout=10)
        assert b"".join(a.part for a in answers) == b"".join(b.data for b in blocks)
    hits.close()


def test_a_client_that_reads_byte_by_byte_loses_its_lease(
    daemon: SidecarProcess, tmp_path: Path
) -> None:
    hits = Hits(daemon)
    blocks = store(daemon, WIDE, WIDE_TOKENS)
    usual = hits.median_seconds()
    watched = Watched(daemon)
    with (
        trickling(daemon, tmp_path / "slow", bytes_a_time=1, pause_seconds=0.001) as path,
        grpc.insecure_channel(f"unix:{path}") as channel,
    ):
        request = pb.GetRequest(namespace=WIDE.digest(), keys=[b.key for b in blocks], inline=True)
        call = rpc.BlockStoreStub(channel).Get(request)
        daemon.wait(lambda stat: stat.open_leases == 1, "it has begun")
        assert hits.median_seconds() < 2 * usual + 0.001
        daemon.wait(lambda stat: stat.open_leases == 0, "its lease is over")
        daemon.wait(lambda _: watched.lines("status=DEADLINE_EXCEEDED") == 1, "it is said")
        assert watched.grown_bytes < 16 * MIB
        call.cancel()
    hits.close()


def test_streams_beyond_the_bound_are_refused_and_others_read_on(patient: SidecarProcess) -> None:
    hits = Hits(patient)
    usual = hits.median_seconds()
    watched = Watched(patient)
    with patient.channel() as channel:
        stub = rpc.BlockStoreStub(channel)
        streams = [PutStream(stub, NS) for _ in range(MAX_PUT_STREAMS)]
        for stream in streams:
            assert len(stream.commit([0])) == 1
        refused = PutStream(stub, NS)
        assert status_of(refused.answers) is grpc.StatusCode.RESOURCE_EXHAUSTED
        assert hits.median_seconds() < 2 * usual + 0.001
        assert watched.grown_bytes < 64 * MIB
        streams.pop().close()
        store(patient, NS, [600])
        for stream in streams:
            stream.answers.cancel()
    assert watched.lines("call refused: call=Put status=RESOURCE_EXHAUSTED") == 1
    hits.close()


def test_connections_that_never_call_make_nobody_wait(patient: SidecarProcess) -> None:
    hits = Hits(patient)
    usual = hits.median_seconds()
    watched = Watched(patient)
    with contextlib.ExitStack() as held:
        for _ in range(3 * MAX_CONNECTIONS):
            idle = held.enter_context(socket.socket(socket.AF_UNIX))
            idle.connect(str(patient.socket))
        assert hits.median_seconds() < 2 * usual + 0.001
        watched.wait_for_descriptors(MAX_CONNECTIONS)
        assert watched.grown_bytes < 64 * MIB
    assert watched.lines("connection refused: ") == 1
    hits.close()


def test_leases_that_are_never_released_are_bounded_and_end(daemon: SidecarProcess) -> None:
    blocks = store(daemon, NS, list(range(700, 900)))
    request = pb.GetRequest(namespace=NS.digest(), keys=[b.key for b in blocks], batch=True)
    watched = Watched(daemon)
    codes = set()
    with daemon.channel() as channel:
        stub = rpc.BlockStoreStub(channel)
        end = time.monotonic() + 3 * DEADLINE_SECONDS
        while time.monotonic() < end:
            codes.add(status_of(stub.Get(request, timeout=60)))
            assert daemon.stat().open_leases <= MAX_LEASES
        assert codes == {grpc.StatusCode.OK}  # they expire as fast as they are given
        assert watched.grown_bytes < 32 * MIB
        daemon.wait(lambda stat: stat.open_leases == 0, "all are over")
        twice = pb.GetRequest(namespace=NS.digest(), keys=[blocks[0].key] * 2)
        assert status_of(stub.Get(twice, timeout=10)) is grpc.StatusCode.INVALID_ARGUMENT


def test_more_leases_than_the_bound_are_refused_with_one_line(patient: SidecarProcess) -> None:
    (block,) = store(patient, NS, [700, 701])
    request = pb.GetRequest(namespace=NS.digest(), keys=[block.key])
    watched = Watched(patient)
    with patient.channel() as channel:
        stub = rpc.BlockStoreStub(channel)
        codes = [status_of(stub.Get(request, timeout=60)) for _ in range(MAX_LEASES + 50)]
        exhausted = grpc.StatusCode.RESOURCE_EXHAUSTED
        assert codes == [grpc.StatusCode.OK] * MAX_LEASES + [exhausted] * 50
        assert watched.lines("call refused: call=Get status=RESOURCE_EXHAUSTED") == 1
        assert watched.grown_bytes < 32 * MIB
        store(patient, NS, [702, 703])  # storing and looking up go on


# --- names --------------------------------------------------------------------------------------

TRICKS = (
    b"../../../../../../../etc/passwd\0",
    b"/etc/passwd/////////////////////",
    b"..%2f..%2f..%2f..%2f..%2f..%2f..",
    b"\0" * 32,
    b"\xff" * 32,
    b"v1/../../../ram/.lock/../../../x",
)


@pytest.mark.parametrize("trick", TRICKS)
def test_no_key_leads_out_of_a_tiers_directory(patient: SidecarProcess, trick: bytes) -> None:
    assert len(trick) == 32
    before = {*patient.root.rglob("*")}
    with patient.channel() as channel:
        stub = rpc.BlockStoreStub(channel)
        stream = PutStream(stub, NS)
        offer = pb.BlockOffer(key=trick, parent=trick[::-1], file_bytes=SMALLEST_BYTES)
        (reserved,) = stream.call(reserve=pb.PutReserve(offers=[offer])).reserved.reservations
        path = Path(os.fsdecode(reserved.path))
        assert path.parent == patient.ram_dir / "v1" / NS.digest().hex() / trick.hex()[:2]
        stream.close()
        get = pb.GetRequest(namespace=trick, keys=[trick], inline=True)
        assert [answer.found for answer in stub.Get(get, timeout=10)] == [False]
        corrupt = pb.ReportCorruptRequest(namespace=trick, key=trick, detail="x\nforged line")
        assert not stub.ReportCorrupt(corrupt, timeout=10).quarantined
        remove = pb.RemoveSeqRequest(namespace=trick, keys=[trick])
        assert stub.RemoveSeq(remove, timeout=10).removed_blocks == 0
    assert not any(line.startswith("forged") for line in patient.lines)
    inside = (patient.ram_dir, patient.local_dir)
    new = {*patient.root.rglob("*")} - before
    assert all(any(path.is_relative_to(tier) for tier in inside) for path in new)


@pytest.mark.parametrize("name", [b"", b".", b"..", b"../../x", b"x" * 31, b"x" * 33, b"x" * 4096])
def test_a_name_of_another_length_is_refused(patient: SidecarProcess, name: bytes) -> None:
    invalid = grpc.StatusCode.INVALID_ARGUMENT
    with patient.channel() as channel:
        stub = rpc.BlockStoreStub(channel)
        for request in (
            pb.GetRequest(namespace=name, keys=[bytes(32)]),
            pb.GetRequest(namespace=NS.digest(), keys=[name]),
        ):
            assert status_of(stub.Get(request, timeout=10)) is invalid
        stream = PutStream(stub, NS)
        offer = pb.BlockOffer(key=name, parent=NS.digest(), file_bytes=SMALLEST_BYTES)
        stream.outgoing.put(pb.PutRequest(reserve=pb.PutReserve(offers=[offer])))
        assert status_of(stream.answers) is invalid


def test_a_description_full_of_paths_is_text_in_its_own_directory(patient: SidecarProcess) -> None:
    outside = patient.root / "outside"
    ns = samples.namespace(f"../../../{outside}\0/../\n", layers=1)
    store(patient, ns, [1, 2])
    (described,) = patient.ram_dir.rglob("namespace.json")
    assert described.parent == patient.ram_dir / "v1" / ns.digest().hex()
    assert not outside.exists()


def test_a_description_without_end_is_refused(patient: SidecarProcess) -> None:
    ns = samples.namespace("m" * (MAX_TEXT_BYTES + 1), layers=1)
    with patient.channel() as channel:
        stream = PutStream(rpc.BlockStoreStub(channel), ns)
        assert status_of(stream.answers) is grpc.StatusCode.INVALID_ARGUMENT
    assert not [*patient.root.rglob("namespace.json")]
    assert not [*(patient.ram_dir / "v1").iterdir()]
