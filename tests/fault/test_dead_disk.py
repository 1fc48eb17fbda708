"""A disk that never answers again: RAM is served, and the sidecar still ends when it is told to."""

from __future__ import annotations

import threading
import time
from pathlib import Path
from typing import Any

import grpc
import pytest

from measure.store import samples
from ollama_tiering.protocol import calls as rpc
from ollama_tiering.store.block.pb import block_store_pb2 as pb
from tests.fault.abuse import NS, store
from tests.sidecar import SidecarProcess

pytestmark = pytest.mark.fault

TOKENS = list(range(12))
# Of a stop: gRPC's grace, the pool's, the drain, and the index, each given up in its time.
STOP_SECONDS = 2 + 2 + 10 + 5 + 5


class DyingDisk(SidecarProcess):
    """`call` of its local tier hangs once it is told to."""

    def __init__(self, root: Path, call: str, **more: Any) -> None:
        super().__init__(root, **more)
        self._call = call

    def command(self) -> list[str]:
        python, _, _, *rest = super().command()
        script = str(Path(__file__).with_name("hanging.py"))
        return [python, script, str(self.root), self._call, *rest]

    def die(self) -> None:
        (self.root / "dead").touch()

    def wait_entered(self) -> None:
        end = time.monotonic() + 15
        while not (self.root / "entered").exists():
            assert time.monotonic() < end, self.log
            time.sleep(0.01)


def check_stop(daemon: DyingDisk) -> None:
    start = time.monotonic()
    assert daemon.stop() == 0, daemon.log
    assert time.monotonic() - start < STOP_SECONDS


def reader(daemon: SidecarProcess, *, inline: bool) -> threading.Thread:
    """A client that asks for the blocks and gets no answer."""
    keys = [block.key for block in samples.sequence(NS, TOKENS)]

    def read() -> None:
        with daemon.channel() as channel:
            get = pb.GetRequest(namespace=NS.digest(), keys=keys, inline=inline)
            try:
                list(rpc.BlockStoreStub(channel).Get(get, timeout=60))
            except grpc.RpcError:
                return

    thread = threading.Thread(target=read, daemon=True)
    thread.start()
    return thread


@pytest.mark.parametrize("call", ["exists", "open"])
def test_a_read_that_hangs_does_not_keep_the_sidecar_from_ending(tmp_path: Path, call: str) -> None:
    daemon = DyingDisk(tmp_path, call, ram_gb=0)
    with daemon:
        store(daemon, NS, TOKENS)
        daemon.die()
        client = reader(daemon, inline=call == "open")
        daemon.wait_entered()
        assert daemon.stat().version
        check_stop(daemon)
        client.join(15)
        assert not client.is_alive()


def test_staging_that_hangs_does_not_keep_the_sidecar_from_ending(tmp_path: Path) -> None:
    daemon = DyingDisk(tmp_path, "open", settings={"local_encoding": "zstd"})
    with daemon:
        store(daemon, NS, TOKENS)
        daemon.wait_written()
    for file in daemon.ram_dir.rglob("*.kvb"):  # as a reboot
        file.unlink()
    with daemon:
        daemon.die()
        client = reader(daemon, inline=False)
        daemon.wait_entered()
        check_stop(daemon)
        client.join(15)


@pytest.mark.parametrize("call", ["create", "seal", "sync_names"])
def test_a_write_that_hangs_does_not_keep_the_sidecar_from_ending(
    tmp_path: Path, call: str
) -> None:
    daemon = DyingDisk(tmp_path, call)
    with daemon:
        daemon.die()
        store(daemon, NS, TOKENS)
        daemon.wait_entered()
        check_stop(daemon)
