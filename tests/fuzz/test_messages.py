"""Requests of every kind to a real sidecar: it refuses with a status of its list, and goes on.

Every field of every request is aimed at. Nothing outside of the tiers and the runtime directory is
read or written, budgets hold, and memory stays below a bound.
"""

from __future__ import annotations

import dataclasses
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import grpc
import pytest

from ollama_tiering.protocol import calls as rpc
from ollama_tiering.store.block.pb import block_store_pb2 as pb
from tests.fuzz import messages
from tests.fuzz.campaign import Campaign, count, time_limit
from tests.fuzz.mutations import NAMESPACE, NS
from tests.fuzz.watched import WatchedSidecar
from tests.sidecar import PutStream

INPUTS, STREAMS = count("messages"), count("streams")
GIB = 1 << 30
RAM_BYTES, LOCAL_BYTES = 8 << 20, 24 << 20
BOUND_BYTES = 512 << 20  # a message has 16 MiB, 8 threads and their answers
REFILL = 250
GARBLED = 0.1  # of the requests: not what protobuf writes
CALL_SECONDS = 30

# Those at the head of the protocol, and CANCELLED where a client gave up.
DOCUMENTED = {
    grpc.StatusCode.OK,
    grpc.StatusCode.INVALID_ARGUMENT,
    grpc.StatusCode.RESOURCE_EXHAUSTED,
    grpc.StatusCode.DATA_LOSS,
}


@pytest.fixture(scope="module")
def daemon(tmp_path_factory: pytest.TempPathFactory) -> Iterator[WatchedSidecar]:
    root = tmp_path_factory.mktemp("watched")
    budgets = {"ram_gb": RAM_BYTES / GIB, "local_gb": LOCAL_BYTES / GIB}
    settings = {"local_encoding": "zstd"}
    with WatchedSidecar(root, settings=settings, **budgets) as running:
        yield running


@pytest.fixture
def channel(daemon: WatchedSidecar) -> Iterator[grpc.Channel]:
    options = [("grpc.max_receive_message_length", -1), ("grpc.max_send_message_length", -1)]
    with grpc.insecure_channel(f"unix:{daemon.socket}", options=options) as opened:
        yield opened


def code_of(answer: Any, *, stream: bool) -> grpc.StatusCode:
    """Takes the whole answer."""
    try:
        for _ in answer() if stream else [answer()]:
            pass
    except grpc.RpcError as error:
        code: grpc.StatusCode = error.code()  # type: ignore[attr-defined]
        if code not in DOCUMENTED:
            error.add_note(str(error))
            raise
        return code
    return grpc.StatusCode.OK


def call(channel: grpc.Channel, method: Any, request: bytes) -> grpc.StatusCode:
    path = f"/{rpc.BLOCK_STORE}/{method.name}"
    make = channel.unary_stream if method.server_streaming else channel.unary_unary
    send = make(path, _same, _same)
    return code_of(lambda: send(request, timeout=CALL_SECONDS), stream=method.server_streaming)


def _same(data: bytes) -> bytes:
    return data


def refill(stub: Any) -> None:
    stream = PutStream(stub, NS)
    for one in messages.RAW:
        for start in range(0, len(one.data), 1 << 20):
            part = one.data[start : start + (1 << 20)]
            last = start + len(part) == len(one.data)
            inline = pb.PutInline(key=one.key, part=part, last=last)
            stream.outgoing.put(pb.PutRequest(inline=inline))
        (result,) = next(stream.answers).committed.results
        assert result.stored, result.reason
    stream.close()


def still_well(daemon: WatchedSidecar, stub: Any) -> None:
    """It answers, holds its budgets, has touched nothing it should not, and gives what was put."""
    refill(stub)
    for one in messages.RAW:
        request = pb.GetRequest(namespace=NAMESPACE, keys=[one.key], inline=True)
        answers = list(stub.Get(request, timeout=CALL_SECONDS))
        assert b"".join(answer.part for answer in answers) == one.data
        stub.Release(pb.ReleaseRequest(lease_id=answers[0].lease_id), timeout=CALL_SECONDS)
    assert "Traceback" not in daemon.log, daemon.log[-5000:]
    for tier in daemon.stat().tiers:
        held = Path(os.fsdecode(tier.directory))
        physical = sum(p.lstat().st_blocks * 512 for p in [held, *held.rglob("*")])
        assert physical <= tier.budget_bytes
    assert daemon.outside() == []
    assert daemon.peak_bytes() < BOUND_BYTES


@pytest.mark.timeout(time_limit(INPUTS))
def test_no_request_does_harm(daemon: WatchedSidecar, channel: grpc.Channel) -> None:
    stub = rpc.BlockStoreStub(channel)
    campaign = Campaign("messages", INPUTS)
    for number in campaign:
        with campaign.input(number) as rng:
            if number % REFILL == 0:
                refill(stub)
            method, message = messages.aimed(rng, number)
            data = message.SerializeToString()
            if rng.random() < GARBLED:
                data = messages.garbled(rng, message)
            code = call(channel, method, data)
            campaign.outcomes[code.name] += 1
    still_well(daemon, stub)
    assert len(messages.TARGETS) > 50
    print(
        f"{len(messages.TARGETS)} fields of {len(messages.UNARY)} calls; peak memory "
        f"{daemon.peak_bytes() >> 20} MiB"
    )
    campaign.report()


@pytest.mark.timeout(time_limit(STREAMS))
def test_no_stream_of_a_writer_does_harm(daemon: WatchedSidecar, channel: grpc.Channel) -> None:
    stub = rpc.BlockStoreStub(channel)
    put = channel.stream_stream(f"/{rpc.BLOCK_STORE}/Put", _same, _same)
    campaign = Campaign("streams", STREAMS)
    for number in campaign:
        with campaign.input(number) as rng:
            requests = messages.put_stream(rng, number)
            sent = [request.SerializeToString() for request in requests]
            if rng.random() < GARBLED:
                at = rng.randrange(len(sent))
                sent[at] = messages.garbled(rng, requests[at])
            code = code_of(lambda: put(iter(sent), timeout=CALL_SECONDS), stream=True)  # noqa: B023
            campaign.outcomes[code.name] += 1
    daemon.wait(
        lambda stat: not any(tier.reserved_bytes for tier in stat.tiers[:1]),
        "what was reserved is given back",
    )
    still_well(daemon, stub)
    campaign.report()


def test_the_watch_sees_what_lies_outside(tmp_path: Path) -> None:
    """A check that sees nothing would always pass."""
    secret = tmp_path / "secret"
    secret.write_text("x")
    (tmp_path / "link").symlink_to(secret)
    program = (
        "import os, sys; sys.argv = ['watch', sys.argv[1], '--version']\n"
        "import tests.fuzz.watch as watch\n"
        "w = watch.Watch(sys.argv[1]); w.install()\n"
        f"d = os.open({str(tmp_path)!r}, os.O_RDONLY)\n"
        "os.close(os.open('link', os.O_RDONLY, dir_fd=d))\n"
        "os.mkdir('made', dir_fd=d)\n"
    )
    daemon = WatchedSidecar(tmp_path / "root")
    daemon.root.mkdir()
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
    command = [sys.executable, "-c", program, str(daemon.touched_path)]
    subprocess.run(command, check=True, env=environment, timeout=60)
    assert {("open", str(tmp_path / "link")), ("opened", str(secret))} <= set(daemon.outside())
    assert ("os.mkdir", str(tmp_path / "made")) in daemon.outside()


LONG = "x" * (15 << 20)


def test_reports_of_runners_are_short(daemon: WatchedSidecar, channel: grpc.Channel) -> None:
    """They are kept, and told to everybody who asks."""
    stub = rpc.BlockStoreStub(channel)
    for pid in range(1, 11):
        report = pb.RunnerReport(pid=pid, model=LONG)
        code = code_of(lambda: stub.ReportRunner(report, timeout=CALL_SECONDS), stream=False)  # noqa: B023
        assert code is grpc.StatusCode.INVALID_ARGUMENT
    still_well(daemon, stub)


def test_descriptions_of_namespaces_keep_the_budget(
    daemon: WatchedSidecar, channel: grpc.Channel
) -> None:
    """They are written beside the blocks, and nothing evicts them."""
    stub = rpc.BlockStoreStub(channel)
    for number in range(8):
        wide = dataclasses.replace(NS, model=f"{number}{LONG}")
        stream = PutStream(stub, wide)
        stream.outgoing.put(None)
        code = code_of(lambda: stream.answers, stream=True)  # noqa: B023
        assert code is grpc.StatusCode.INVALID_ARGUMENT
    for number in range(30):
        many = PutStream(stub, dataclasses.replace(NS, model=f"{number}", extra="y" * 5000))
        many.close()
    still_well(daemon, stub)
