"""A sidecar that answers some calls and hangs in others: no request waits long, all are right.

`Proxy` stands between the runner and a real sidecar, passes calls on, and stalls where it is told.
"""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import grpc
import pytest

from ollama_tiering.protocol import calls as rpc
from ollama_tiering.protocol.pb import administration_pb2 as adm
from ollama_tiering.store.block.pb import block_store_pb2 as pb
from tests.engine.harness import Server, Sidecar, assert_same, in_memory, text, wait_until

TOKENS = 300
GIVEN_UP_SECONDS = 2.5


class Proxy:
    """Passes calls on. `stall` names what hangs: the plan of a look-up, its files on the way, a
    file that it names, or Put.
    """

    def __init__(self, target: Path, socket: Path, fifo: Path) -> None:
        self.socket, self.fifo = socket, fifo
        self.stall = ""
        self.stalled = 0
        self._go_on = threading.Event()
        self._channel = grpc.insecure_channel(f"unix:{target}")
        self._real = rpc.BlockStoreStub(self._channel)
        self._server = grpc.server(ThreadPoolExecutor(16))
        rpc.add_to_server(self, self._server)
        self._server.add_insecure_port(f"unix:{socket}")

    def __enter__(self) -> Proxy:
        self._server.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._go_on.set()
        self._server.stop(0).wait()
        self._channel.close()

    def _wait(self, context: Any) -> None:
        self.stalled += 1
        while context.is_active() and not self._go_on.wait(0.05):
            pass

    def CheckFiles(self, request: pb.CheckFilesRequest, context: Any) -> pb.CheckFilesResponse:
        return self._real.CheckFiles(request)

    def Stat(self, request: pb.StatRequest, context: Any) -> adm.StatResponse:
        return self._real.Stat(request)

    def Release(self, request: pb.ReleaseRequest, context: Any) -> pb.ReleaseResponse:
        return self._real.Release(request)

    def ReportRunner(self, request: pb.RunnerReport, context: Any) -> pb.ReportRunnerResponse:
        return self._real.ReportRunner(request)

    def ReportCorrupt(
        self, request: pb.ReportCorruptRequest, context: Any
    ) -> pb.ReportCorruptResponse:
        return self._real.ReportCorrupt(request)

    def LookUp(self, request: pb.LookUpRequest, context: Any) -> Iterator[pb.LookUpResponse]:
        answers = self._real.LookUp(request)
        if self.stall == "plan":
            self._wait(context)
            return
        yield next(answers)
        files = ((answer.lease_id, file) for answer in answers for file in answer.files)
        for number, (lease_id, file) in enumerate(files):
            if number == 2 and self.stall == "files":
                self._wait(context)
                return
            if number == 2 and self.stall == "file":
                self.stalled += 1
                file.path = os.fsencode(self.fifo)
            yield pb.LookUpResponse(lease_id=lease_id, files=[file])

    def Put(self, requests: Iterator[pb.PutRequest], context: Any) -> Iterator[pb.PutResponse]:
        if self.stall == "Put":
            self._wait(context)
            return
        yield from self._real.Put(requests)


@dataclass
class Rig:
    sidecar: Sidecar
    proxy: Proxy
    server: Server
    reference: Server


@pytest.fixture
def rig(binary: Path, models: Path, tmp_path: Path, fast: Path) -> Iterator[Rig]:
    fifo = fast / "fifo"
    os.mkfifo(fifo)
    env = {"OLLAMA_FLASH_ATTENTION": 1}
    with (
        Sidecar(tmp_path / "sidecar", fast) as sidecar,
        Proxy(sidecar.socket, fast / "proxy", fifo) as proxy,
        Server(binary, tmp_path / "tested", models, socket=proxy.socket, env=env) as server,
        Server(binary, tmp_path / "reference", models, env=env) as reference,
    ):
        yield Rig(sidecar, proxy, server, reference)


@pytest.mark.parametrize("stall", ["plan", "files", "file"])
@pytest.mark.parametrize("fresh", [True, False], ids=["just loaded", "speed known"])
def test_a_stall_while_reading_is_given_up(rig: Rig, stall: str, fresh: bool) -> None:
    prompt = text(TOKENS, stall)
    rig.server.generate("g2", prompt)
    rig.sidecar.settle(rig.server, "g2")
    rig.server.unload("g2")
    if not fresh:
        rig.server.generate("g2", text(TOKENS, "is computed"))
    rig.proxy.stall = stall
    answer = rig.server.generate("g2", prompt)
    print(f"{answer.seconds:.2f} s, resumed at {answer.resumed}")
    assert rig.proxy.stalled == 1
    assert_same(answer, in_memory(rig.reference, "g2", prompt, answer.resumed))
    assert answer.seconds < GIVEN_UP_SECONDS


def test_a_stall_while_storing_holds_nothing_up(rig: Rig) -> None:
    rig.proxy.stall = "Put"
    rig.server.generate("g2", text(TOKENS, "first"))
    wait_until("the stall", lambda: rig.proxy.stalled == 1)
    for number in range(5):
        prompt = text(TOKENS, ("stalled", number))
        expected = rig.reference.generate("g2", prompt)
        answer = rig.server.generate("g2", prompt)
        assert_same(answer, expected)
        assert answer.seconds < expected.seconds + 1
    start = time.monotonic()
    rig.server.unload("g2")
    assert time.monotonic() - start < 3.5
