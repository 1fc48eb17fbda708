"""The administration's calls over a real socket: answers, refusals, and work beside clients."""

from __future__ import annotations

import math
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import grpc
import pytest

from measure.store import samples
from ollama_tiering.client.admin_client import SidecarAdministration
from ollama_tiering.errors import ServiceError, TieringError, UsageError
from ollama_tiering.protocol import admin_messages as messages
from ollama_tiering.protocol import calls as rpc
from ollama_tiering.protocol.pb import administration_pb2 as adm
from ollama_tiering.store.block.pb import block_store_pb2 as pb
from ollama_tiering.store.errors import NoRoom
from ollama_tiering.store.tiers.contract import TierKind
from ollama_tiering.store.values import Finding, Selection, VerifyStep
from tests.sidecar import PutStream, SidecarProcess

NS = samples.namespace("administration")


@pytest.fixture
def admin(daemon: SidecarProcess) -> Iterator[SidecarAdministration]:
    with SidecarAdministration(daemon.socket) as opened:
        yield opened


def put(stub: Any, tokens: list[int]) -> list[samples.SampleBlock]:
    blocks = samples.sequence(NS, tokens)
    stream = PutStream(stub, NS)
    assert all(result.stored for result in stream.put(blocks))
    stream.close()
    return blocks


def refusal(call: Any) -> grpc.RpcError:
    with pytest.raises(grpc.RpcError) as caught:
        call()
    return caught.value


@pytest.mark.parametrize(
    "selection",
    [
        adm.Selection(ids=["zz"]),
        adm.Selection(ids=["../../etc/passwd"]),
        adm.Selection(ids=["00000000"]),
        adm.Selection(ids=[""]),
        adm.Selection(ids=["0" * 100_000]),
        adm.Selection(ids=["abcd"] * (messages.MAX_IDS + 1)),
        adm.Selection(older_than_seconds=-1),
        adm.Selection(older_than_seconds=math.nan),
        adm.Selection(older_than_seconds=math.inf),
        adm.Selection(tier=77),  # type: ignore[arg-type]
    ],
)
def test_a_selection_that_makes_no_sense_is_an_invalid_argument(
    stub: Any, selection: adm.Selection
) -> None:
    for call in (
        lambda: list(stub.List(adm.ListRequest(selection=selection), timeout=10)),
        lambda: stub.Remove(adm.RemoveRequest(selection=selection), timeout=10),
    ):
        error: Any = refusal(call)
        assert error.code() is grpc.StatusCode.INVALID_ARGUMENT


@pytest.mark.parametrize("seconds", [-1.0, math.nan, math.inf])
def test_a_collection_over_a_senseless_time_is_refused(stub: Any, seconds: float) -> None:
    request = adm.CollectRequest(older_than_seconds=seconds)
    error: Any = refusal(lambda: stub.Collect(request, timeout=10))
    assert error.code() is grpc.StatusCode.INVALID_ARGUMENT


def test_what_nothing_selects_selects_everything_but_huge_numbers_nothing(
    stub: Any, admin: SidecarAdministration
) -> None:
    put(stub, [1, 2, 3])
    assert admin.listing(Selection()).chains
    most = (1 << 64) - 1
    assert not admin.listing(Selection(min_tokens=most, min_bytes=most)).chains
    assert not admin.listing(Selection(older_than_seconds=1e300)).chains


def test_refusals_come_back_typed_and_with_their_cure(
    stub: Any, admin: SidecarAdministration
) -> None:
    with pytest.raises(UsageError) as caught:
        admin.pin("0000ffff0000")
    assert caught.value.hint == "`tiering ls` shows ids"
    big = samples.namespace("big", kv_heads=64, head_dim=4096, layers=4)
    blocks = samples.sequence(big, list(range(40)))
    stream = PutStream(stub, big)
    stored = [result.stored for result in stream.put(blocks)]
    stream.close()
    assert stored.count(True) >= 7  # 8 MiB each, and pins may have half of 0.1 GiB
    with pytest.raises(NoRoom) as refused:
        admin.pin(blocks[6].key.hex())
    assert "may be pinned" in refused.value.message
    assert "unpin" in (refused.value.hint or "")
    admin.remove(Selection(model="big"), dry_run=False)


def test_a_sidecar_that_is_gone_is_a_service_error(tmp_path: Path) -> None:
    with SidecarAdministration(tmp_path / "s") as admin, pytest.raises(ServiceError):
        admin.listing(Selection())


def test_the_client_and_the_store_say_the_same(stub: Any, admin: SidecarAdministration) -> None:
    blocks = put(stub, list(range(100, 110)))
    listing = admin.listing(Selection(ids=(blocks[-1].key.hex(),)))
    (line,) = listing.chains
    assert (line.tokens, line.blocks, line.namespace) == (10, 3, NS.digest())
    assert listing.descriptions[NS.digest()] == tuple(NS.fields())
    single = admin.listing(Selection(ids=(blocks[-1].key.hex(),)), blocks=True).blocks
    assert [one.key for one in single] == [block.key for block in blocks]
    assert single[1].parent == blocks[0].key


def test_many_lines_come_in_several_messages(stub: Any) -> None:
    wanted = {
        put(stub, [5000 + number])[0].key for number in range(messages.LINES_PER_MESSAGE + 20)
    }
    head, *rest = stub.List(adm.ListRequest(selection=adm.Selection(model="administr")), timeout=30)
    lines = [line for message in rest for line in message.chains]
    assert head.head.lines == len(lines)
    assert len(rest) >= 2
    assert wanted <= {line.key for line in lines}
    ids = [key.hex() for key in wanted]
    removed = stub.Remove(adm.RemoveRequest(selection=adm.Selection(ids=ids)), timeout=60)
    assert removed.blocks == len(wanted)


def test_verification_beside_clients_finds_nothing_and_stops_when_cancelled(
    daemon: SidecarProcess, stub: Any, admin: SidecarAdministration
) -> None:
    for number in range(100):
        put(stub, [7000 + number])
    stopping = threading.Event()
    failures: list[BaseException] = []

    def work() -> None:
        number = 0
        try:
            with daemon.channel() as channel:
                own = rpc.BlockStoreStub(channel)
                while not stopping.is_set():
                    blocks = put(own, [8000 + number % 50, number])
                    keys = [block.key for block in blocks]
                    request = pb.RemoveSeqRequest(namespace=NS.digest(), keys=keys)
                    own.RemoveSeq(request, timeout=10)
                    number += 1
        except BaseException as error:
            failures.append(error)

    threads = [threading.Thread(target=work) for _ in range(2)]
    for thread in threads:
        thread.start()
    try:
        for repair in (False, True, False):
            steps = list(admin.verify(repair=repair))
            assert steps[-1].done_blocks > 100
            assert [found for step in steps for found in step.findings] == []
        for _ in range(5):
            answers = stub.Verify(adm.VerifyRequest(), timeout=30)
            next(answers)
            answers.cancel()
    finally:
        stopping.set()
        for thread in threads:
            thread.join(20)
    assert failures == []
    assert admin.collect(older_than_seconds=0, models=None, dry_run=False)
    assert daemon.stat().misses.get("corrupt", 0) == 0


def test_what_a_file_is_called_need_not_be_text() -> None:
    finding = Finding(TierKind.LOCAL, "foreign", "v1/\udcff\udcfe")
    step = messages.step_of(messages.step_message(VerifyStep(1, 1, 1, (finding,))))
    assert step.findings[0].path == "v1/\\xff\\xfe"


def test_an_error_without_a_class_of_its_own_is_still_an_error(
    daemon: SidecarProcess, admin: SidecarAdministration, tmp_path: Path
) -> None:
    with pytest.raises(TieringError):
        admin.chain("ffffffffffff")
