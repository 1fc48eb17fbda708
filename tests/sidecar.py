"""A real sidecar in a process of its own: the one way in which tests start it.

It is ended by its own process id. Who starts another program around it overrides `command`.
"""

from __future__ import annotations

import json
import os
import queue
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Mapping
from pathlib import Path
from types import TracebackType
from typing import Any, ClassVar, Self

import grpc

from measure.store import samples
from ollama_tiering.client.channel import SidecarChannel
from ollama_tiering.protocol import calls as rpc
from ollama_tiering.protocol.pb import administration_pb2 as adm
from ollama_tiering.store.block.key import Namespace
from ollama_tiering.store.block.pb import block_store_pb2 as pb
from ollama_tiering.system.listener import grpc_address

START_SECONDS = 60.0
STOP_SECONDS = 30.0
SAID_SECONDS = 10.0


def counted(answer: adm.StatResponse) -> bool:
    return all(tier.surveyed for tier in answer.tiers)


class SidecarProcess:
    """`root` holds settings and tiers; `fast`, a short path, the socket and the RAM tier, else
    `root` does. A context manager; start and stop as often as needed.
    """

    # Nothing waits for a longer block, or is left out as too short or for lack of room.
    usual: ClassVar[Mapping[str, Any]] = {"tail_seconds": 0, "min_tokens": 1, "min_free_percent": 0}

    def __init__(
        self,
        root: Path,
        *,
        ram_gb: float = 0.05,
        local_gb: float = 0.1,
        fast: Path | None = None,
        env: Mapping[str, str] | None = None,
        settings: Mapping[str, Any] | None = None,
    ) -> None:
        self.root = root
        self.socket = (fast or root) / "run" / "s"
        self.ram_dir = (fast or root) / "ram"
        self.local_dir = root / "local"
        self.budgets = (ram_gb, local_gb)
        self.env = env or {}
        self.settings = settings or {}
        self.process: subprocess.Popen[str] | None = None
        self.lines: list[str] = []

    def command(self) -> list[str]:
        return [
            *(sys.executable, "-m", "ollama_tiering", "sidecar", "--log-level", "info"),
            *("--socket", str(self.socket), "--ram-dir", str(self.ram_dir)),
            *("--local", str(self.local_dir), "--ram-gb", str(self.budgets[0])),
            *("--local-gb", str(self.budgets[1])),
        ]

    def inherited(self) -> dict[str, str]:
        return {k: v for k, v in os.environ.items() if not k.startswith("OLLAMA_")}

    def environment(self) -> dict[str, str]:
        """Of its process; writes the settings."""
        paths = os.pathsep.join(filter(None, sys.path))
        config = self.root / "config"
        settings = config / "ollama-tiering" / "config.toml"
        settings.parent.mkdir(parents=True, exist_ok=True)
        lines = {**self.usual, **self.settings}
        text = "".join(f"{key} = {json.dumps(value)}\n" for key, value in lines.items())
        settings.write_text(f"[sidecar]\n{text}")
        return {
            **self.inherited(),
            "PYTHONPATH": paths,
            "XDG_CONFIG_HOME": str(config),
            "XDG_STATE_HOME": str(self.root / "state"),
            **self.env,
        }

    def launch(self, stderr: int = subprocess.STDOUT) -> subprocess.Popen[str]:
        """Only the process, for whoever does not expect it to serve, or not as usual."""
        return subprocess.Popen(
            self.command(),
            env=self.environment(),
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=stderr,
            text=True,
        )

    def start(self) -> Self:
        self.lines = []
        process = self.process = self.launch()
        ready = threading.Event()

        def read() -> None:
            assert process.stdout is not None
            with process.stdout as output:
                for line in output:
                    self.heard(line)
                    if "sidecar ready" in line:
                        ready.set()
            ready.set()

        self.reader = threading.Thread(target=read, daemon=True)
        self.reader.start()
        try:
            assert ready.wait(START_SECONDS), self.log
            assert "sidecar ready" in self.log, self.log
            self.wait(counted, "all files are counted: what is put finds room", START_SECONDS)
        except BaseException:
            process.kill()
            process.wait()
            raise
        return self

    def heard(self, line: str) -> None:
        """What it has said just now."""
        self.lines.append(line)

    @property
    def log(self) -> str:
        return "".join(self.lines)

    def said(self, text: str) -> int:
        """How often it said so. Waits until it has once: its log comes through a pipe and a thread,
        so what it wrote before it answered may be read after the answer.
        """
        end = time.monotonic() + SAID_SECONDS
        while text not in self.log and time.monotonic() < end:
            time.sleep(0.01)
        return self.log.count(text)

    @property
    def running(self) -> bool:
        return self.process is not None and self.process.poll() is None

    def send_signal(self, number: signal.Signals) -> None:
        assert self.process is not None
        self.process.send_signal(number)

    def stop(self, number: signal.Signals = signal.SIGTERM) -> int:
        """Its exit code. One that does not end in time is killed, and that is an error."""
        assert self.process is not None
        self.send_signal(number)
        try:
            code = self.process.wait(STOP_SECONDS)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()
            raise
        self.reader.join(5)
        return code

    def kill(self) -> None:
        self.stop(signal.SIGKILL)

    def restart(self) -> None:
        self.stop()
        self.start()

    def __enter__(self) -> Self:
        return self.start()

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if self.running:
            self.stop()

    def channel(self) -> grpc.Channel:
        return grpc.insecure_channel(grpc_address(self.socket))

    def stat(self) -> adm.StatResponse:
        answer: adm.StatResponse
        if "," in str(self.socket):  # gRPC has no address for it
            with SidecarChannel(self.socket) as checked:
                answer = checked.stub().Stat(pb.StatRequest(), timeout=10)
            return answer
        with self.channel() as channel:
            answer = rpc.BlockStoreStub(channel).Stat(pb.StatRequest(), timeout=10)
        return answer

    def wait(self, condition: Any, what: str, seconds: float = 15.0) -> adm.StatResponse:
        """Asks until the answer of Stat fulfils the condition."""
        end = time.monotonic() + seconds
        while True:
            answer = self.stat()
            if condition(answer):
                return answer
            assert time.monotonic() < end, f"{what}\n{answer}\n{self.log}"
            time.sleep(0.02)

    def wait_written(self) -> adm.StatResponse:
        return self.wait(lambda stat: stat.queued_demotions == 0, "all blocks are written down")


class PutStream:
    """One raw Put stream."""

    def __init__(self, stub: Any, ns: Namespace) -> None:
        self.outgoing: queue.SimpleQueue[pb.PutRequest | None] = queue.SimpleQueue()
        self.answers = stub.Put(iter(self.outgoing.get, None), timeout=30)
        fields = [pb.NamespaceField(name=name, value=value) for name, value in ns.fields()]
        self.outgoing.put(
            pb.PutRequest(
                open=pb.PutOpen(
                    namespace=ns.digest(),
                    description=pb.Namespace(fields=fields),
                    block_tokens=int(ns.block_tokens),
                )
            )
        )

    def call(self, **op: Any) -> pb.PutResponse:
        self.outgoing.put(pb.PutRequest(**op))
        answer: pb.PutResponse = next(self.answers)
        return answer

    def reserve(self, blocks: list[samples.SampleBlock]) -> list[pb.Reservation]:
        offers = [
            pb.BlockOffer(key=b.key, parent=b.parent, file_bytes=len(b.data), tail=b.tail)
            for b in blocks
        ]
        return list(self.call(reserve=pb.PutReserve(offers=offers)).reserved.reservations)

    def commit(self, ids: list[int]) -> list[pb.Committed]:
        return list(self.call(commit=pb.PutCommit(reservation_ids=ids)).committed.results)

    def put(self, blocks: list[samples.SampleBlock]) -> list[pb.Committed]:
        """Stores those of the blocks that are not there yet."""
        ids = []
        for block, reservation in zip(blocks, self.reserve(blocks), strict=True):
            if reservation.path:
                Path(os.fsdecode(reservation.path)).write_bytes(block.data)
                ids.append(reservation.id)
        return self.commit(ids)

    def close(self) -> None:
        self.outgoing.put(None)
        for _ in self.answers:
            pass
