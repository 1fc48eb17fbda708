"""The protocol over a real socket: what each call answers, and with which status it refuses."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import grpc
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection_pb2, reflection_pb2_grpc

from measure.store import samples
from ollama_tiering import __version__
from ollama_tiering.protocol import calls as rpc
from ollama_tiering.store.block.key import prefix_chain, tokens_to_bytes
from ollama_tiering.store.block.pb import block_store_pb2 as pb
from tests.sidecar import PutStream, SidecarProcess

NS = samples.namespace()
NAMESPACE = NS.digest()


def has(stub: Any, tokens: list[int]) -> pb.HasResponse:
    data = tokens_to_bytes(tokens)
    answer: pb.HasResponse = stub.Has(
        pb.HasRequest(
            namespace=NAMESPACE,
            keys=prefix_chain(NAMESPACE, data, 4),
            tokens=data,
            block_tokens=4,
        ),
        timeout=10,
    )
    return answer


def put(stub: Any, tokens: list[int]) -> list[samples.SampleBlock]:
    blocks = samples.sequence(NS, tokens)
    stream = PutStream(stub, NS)
    assert all(result.stored for result in stream.put(blocks))
    stream.close()
    return blocks


def code_of(call: Any) -> grpc.StatusCode:
    with pytest.raises(grpc.RpcError) as caught:
        call()
    code: grpc.StatusCode = caught.value.code()  # type: ignore[attr-defined]
    return code


def test_an_unknown_prompt_is_an_empty_answer_and_no_error(stub: Any) -> None:
    assert has(stub, [1, 2, 3]) == pb.HasResponse()


def test_what_was_put_is_matched_to_the_token(stub: Any) -> None:
    put(stub, [10, 11, 12, 13, 14, 15, 16, 17, 18, 19])
    answer = has(stub, [10, 11, 12, 13, 14, 15, 16, 17, 18, 99])
    assert answer.matched_tokens == 9
    assert [(block.rows, block.block_rows) for block in answer.blocks] == [(4, 4), (4, 4), (1, 2)]
    assert all(block.expected_seconds > 0 for block in answer.blocks)
    assert all(block.tier == pb.TIER_RAM for block in answer.blocks)


def test_get_names_files_that_hold_what_was_put(stub: Any) -> None:
    blocks = put(stub, list(range(20, 30)))
    keys = [block.key for block in blocks]
    answers = list(stub.Get(pb.GetRequest(namespace=NAMESPACE, keys=keys), timeout=10))
    assert [answer.key for answer in answers] == keys
    assert len({answer.lease_id for answer in answers}) == 1
    for answer, block in zip(answers, blocks, strict=True):
        assert answer.found
        assert answer.file_bytes == len(block.data)
        assert Path(os.fsdecode(answer.path)).read_bytes() == block.data
    stub.Release(pb.ReleaseRequest(lease_id=answers[0].lease_id), timeout=10)


def test_get_names_many_files_in_one_answer_when_asked_to(stub: Any) -> None:
    blocks = put(stub, list(range(400, 400 + 4 * 70)))
    keys = [block.key for block in blocks]
    request = pb.GetRequest(namespace=NAMESPACE, keys=[*keys, bytes(32)], batch=True)
    first, second, missing = list(stub.Get(request, timeout=10))
    answers = [first, *first.more, second, *second.more]
    assert (len(first.more), len(second.more)) == (63, 5)
    assert [answer.key for answer in answers] == keys
    assert all(answer.found and answer.path for answer in answers)
    assert len({answer.lease_id for answer in [*answers, missing]}) == 1
    assert not missing.found
    assert not missing.more
    stub.Release(pb.ReleaseRequest(lease_id=first.lease_id), timeout=10)


def test_get_inline_sends_the_bytes_in_parts(stub: Any) -> None:
    wide = samples.namespace("wide", kv_heads=8, head_dim=4096, layers=3)
    (block,) = samples.sequence(wide, [1, 2, 3, 4])
    assert len(block.data) > 1 << 20
    stream = PutStream(stub, wide)
    assert [result.stored for result in stream.put([block])] == [True]
    stream.close()
    request = pb.GetRequest(namespace=wide.digest(), keys=[block.key], inline=True)
    answers = list(stub.Get(request, timeout=10))
    assert len(answers) > 1
    assert all(len(answer.part) <= 1 << 20 for answer in answers)
    assert b"".join(answer.part for answer in answers) == block.data


def test_get_stops_at_the_first_block_that_is_not_there(stub: Any) -> None:
    blocks = put(stub, list(range(40, 52)))
    missing = bytes(32)
    keys = [blocks[0].key, missing, blocks[1].key]
    answers = list(stub.Get(pb.GetRequest(namespace=NAMESPACE, keys=keys), timeout=10))
    assert [(answer.key, answer.found) for answer in answers] == [
        (blocks[0].key, True),
        (missing, False),
    ]


def test_put_inline_stores_a_whole_block(stub: Any) -> None:
    (block,) = samples.sequence(NS, [60, 61, 62])
    stream = PutStream(stub, NS)
    half = len(block.data) // 2
    stream.outgoing.put(pb.PutRequest(inline=pb.PutInline(key=block.key, part=block.data[:half])))
    last = pb.PutInline(key=block.key, part=block.data[half:], last=True)
    assert [r.stored for r in stream.call(inline=last).committed.results] == [True]
    stream.close()
    assert has(stub, [60, 61, 62]).matched_tokens == 3


def test_put_inline_with_a_flipped_bit_is_not_stored(stub: Any) -> None:
    (block,) = samples.sequence(NS, [63, 64])
    damaged = bytearray(block.data)
    damaged[4100] ^= 1
    stream = PutStream(stub, NS)
    inline = pb.PutInline(key=block.key, part=bytes(damaged), last=True)
    (result,) = stream.call(inline=inline).committed.results
    assert not result.stored
    assert "checksum" in result.reason
    stream.close()
    assert has(stub, [63, 64]).matched_tokens == 0


def test_a_block_stored_already_is_present(stub: Any) -> None:
    blocks = put(stub, [70, 71])
    stream = PutStream(stub, NS)
    (reservation,) = stream.reserve(blocks)
    assert reservation.outcome == pb.Reservation.OUTCOME_PRESENT
    stream.close()


def test_a_block_being_written_by_another_is_present(stub: Any) -> None:
    blocks = samples.sequence(NS, [72, 73])
    one, other = PutStream(stub, NS), PutStream(stub, NS)
    assert one.reserve(blocks)[0].outcome == pb.Reservation.OUTCOME_RESERVED
    assert other.reserve(blocks)[0].outcome == pb.Reservation.OUTCOME_PRESENT
    one.close()
    other.close()


def test_reservations_die_with_their_stream(daemon: SidecarProcess, stub: Any) -> None:
    blocks = samples.sequence(NS, list(range(80, 90)))
    stream = PutStream(stub, NS)
    paths = [Path(os.fsdecode(reservation.path)) for reservation in stream.reserve(blocks)]
    assert all(path.exists() for path in paths)
    assert daemon.stat().tiers[0].reserved_bytes > 0
    stream.answers.cancel()
    daemon.wait(lambda stat: stat.tiers[0].reserved_bytes == 0, "reservations are released")
    assert not any(path.exists() for path in paths)


def test_a_file_of_another_block_is_not_committed(stub: Any) -> None:
    (wanted,) = samples.sequence(NS, [91, 92])
    (other,) = samples.sequence(NS, [93, 94])
    stream = PutStream(stub, NS)
    (reservation,) = stream.reserve([wanted])
    Path(os.fsdecode(reservation.path)).write_bytes(other.data)
    (result,) = stream.commit([reservation.id])
    assert not result.stored
    assert "another block" in result.reason
    stream.close()


def test_an_unfilled_file_is_not_committed(stub: Any) -> None:
    stream = PutStream(stub, NS)
    (reservation,) = stream.reserve(samples.sequence(NS, [95, 96]))
    (result,) = stream.commit([reservation.id])
    assert not result.stored
    stream.close()


def test_an_unknown_reservation_is_not_stored_and_no_error(stub: Any) -> None:
    stream = PutStream(stub, NS)
    (result,) = stream.commit([12345])
    assert not result.stored
    stream.close()


def test_remove_seq_keeps_what_another_sequence_needs(stub: Any) -> None:
    one = put(stub, [100, 101, 102, 103, 104, 105, 106, 107])
    put(stub, [100, 101, 102, 103, 200, 201, 202, 203])
    request = pb.RemoveSeqRequest(namespace=NAMESPACE, keys=[block.key for block in one])
    answer = stub.RemoveSeq(request, timeout=10)
    assert answer.removed_blocks == 1
    assert answer.removed_bytes >= len(one[0].data)
    assert has(stub, [100, 101, 102, 103, 200]).matched_tokens == 5


def test_a_reported_damage_is_checked_and_quarantined(daemon: SidecarProcess, stub: Any) -> None:
    (block,) = put(stub, [110, 111, 112])
    daemon.wait_written()
    request = pb.ReportCorruptRequest(namespace=NAMESPACE, key=block.key, detail="test")
    assert not stub.ReportCorrupt(request, timeout=10).quarantined
    for file in daemon.root.rglob(f"{block.key.hex()}.kvb"):
        content = bytearray(file.read_bytes())
        content[-4096] ^= 1
        file.chmod(0o600)
        file.write_bytes(content)
    assert stub.ReportCorrupt(request, timeout=10).quarantined
    assert has(stub, [110, 111, 112]).matched_tokens == 0
    assert daemon.stat().misses["corrupt"] >= 1
    assert sum(tier.quarantined_blocks for tier in daemon.stat().tiers) == 2


def test_runner_reports_are_shown_while_the_runner_lives(stub: Any) -> None:
    stub.ReportRunner(pb.RunnerReport(pid=os.getpid(), model="m", tiered=True), timeout=10)
    stub.ReportRunner(pb.RunnerReport(pid=2**22 + 12345, model="dead"), timeout=10)
    runners = stub.Stat(pb.StatRequest(), timeout=10).runners
    assert [(runner.pid, runner.model) for runner in runners] == [(os.getpid(), "m")]


def test_stat_says_version_tiers_and_counters(daemon: SidecarProcess) -> None:
    stat = daemon.stat()
    assert stat.version == __version__
    assert [tier.tier for tier in stat.tiers] == [pb.TIER_RAM, pb.TIER_LOCAL]
    assert [os.fsdecode(tier.directory) for tier in stat.tiers] == [
        str(daemon.ram_dir),
        str(daemon.local_dir),
    ]
    assert stat.has_calls > 0
    assert stat.put_blocks > 0


def test_malformed_requests_are_invalid_argument(stub: Any) -> None:
    invalid = grpc.StatusCode.INVALID_ARGUMENT
    ok = {"namespace": NAMESPACE, "block_tokens": 4}
    for request in (
        pb.HasRequest(**{**ok, "namespace": b"short"}),
        pb.HasRequest(**ok, keys=[b"short"]),
        pb.HasRequest(**ok, tokens=b"abc"),
        pb.HasRequest(namespace=NAMESPACE, block_tokens=0),
        pb.HasRequest(namespace=NAMESPACE, block_tokens=1 << 20),
    ):
        assert code_of(lambda request=request: stub.Has(request, timeout=10)) is invalid
    get = pb.GetRequest(namespace=b"x", keys=[bytes(32)])
    assert code_of(lambda: list(stub.Get(get, timeout=10))) is invalid
    remove = pb.RemoveSeqRequest(namespace=NAMESPACE, keys=[b"x"])
    assert code_of(lambda: stub.RemoveSeq(remove, timeout=10)) is invalid
    corrupt = pb.ReportCorruptRequest(namespace=NAMESPACE, key=b"x")
    assert code_of(lambda: stub.ReportCorrupt(corrupt, timeout=10)) is invalid
    runner = pb.RunnerReport(pid=0)
    assert code_of(lambda: stub.ReportRunner(runner, timeout=10)) is invalid


def test_put_refuses_a_wrong_start_namespace_and_size(stub: Any) -> None:
    invalid = grpc.StatusCode.INVALID_ARGUMENT
    first = pb.PutRequest(reserve=pb.PutReserve())
    assert code_of(lambda: list(stub.Put(iter([first]), timeout=10))) is invalid
    opened = pb.PutOpen(namespace=bytes(32), block_tokens=4)
    wrong = pb.PutRequest(open=opened)
    assert code_of(lambda: list(stub.Put(iter([wrong]), timeout=10))) is invalid
    for file_bytes in (0, 4096, 12289, 1 << 50):
        stream = PutStream(stub, NS)
        offer = pb.BlockOffer(key=bytes(32), parent=NAMESPACE, file_bytes=file_bytes)
        reserve = pb.PutReserve(offers=[offer])
        assert code_of(lambda stream=stream, r=reserve: stream.call(reserve=r)) is invalid
    stream = PutStream(stub, NS)
    inline = pb.PutInline(key=bytes(32), part=bytes(1 << 20 | 1))
    assert code_of(lambda: stream.call(inline=inline)) is invalid


def test_a_block_larger_than_every_budget_has_no_room(stub: Any) -> None:
    stream = PutStream(stub, NS)
    offers = [
        pb.BlockOffer(key=bytes([i]) * 32, parent=NAMESPACE, file_bytes=size)
        for i, size in enumerate((1 << 30, 8192))
    ]
    answer = stream.call(reserve=pb.PutReserve(offers=offers))
    outcomes = [reservation.outcome for reservation in answer.reserved.reservations]
    assert outcomes == [pb.Reservation.OUTCOME_NO_ROOM] * 2  # a chain has no holes
    stream.close()


def test_an_inline_block_without_room_is_resource_exhausted(tmp_path: Path) -> None:
    with SidecarProcess(tmp_path, ram_gb=0.00001, local_gb=0) as small, small.channel() as channel:
        (block,) = samples.sequence(NS, [1])
        stream = PutStream(rpc.BlockStoreStub(channel), NS)
        inline = pb.PutInline(key=block.key, part=block.data, last=True)
        code = code_of(lambda: stream.call(inline=inline))
        assert code is grpc.StatusCode.RESOURCE_EXHAUSTED


def test_health_and_reflection_answer(channel: grpc.Channel) -> None:
    health = health_pb2_grpc.HealthStub(channel)
    for name in ("", "ollama_tiering.v1.BlockStore"):
        answer = health.Check(health_pb2.HealthCheckRequest(service=name), timeout=10)
        assert answer.status == health_pb2.HealthCheckResponse.SERVING
    reflection = reflection_pb2_grpc.ServerReflectionStub(channel)
    request = reflection_pb2.ServerReflectionRequest(list_services="")
    answer = next(reflection.ServerReflectionInfo(iter([request]), timeout=10))
    names = {service.name for service in answer.list_services_response.service}
    assert "ollama_tiering.v1.BlockStore" in names
