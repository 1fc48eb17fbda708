"""A runner that asks for q8_0: half the room, said in `status`, not found by one that does not."""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator

import numpy as np
import pytest
from click.testing import CliRunner

from ollama_tiering.cli import cli
from ollama_tiering.client import BlockClient, Namespace
from ollama_tiering.protocol import calls as rpc
from ollama_tiering.store.block.key import LayerSpec
from ollama_tiering.store.block.pb import block_store_pb2 as pb
from tests.places import short_directory
from tests.sidecar import SidecarProcess

TOKENS = list(range(130))
LAYERS, HEADS, DIM = 2, 4, 64
RNG = np.random.default_rng(0)
CACHE = {
    (layer, kind): RNG.standard_normal((len(TOKENS), HEADS * DIM)).astype(np.float16)
    for layer in range(LAYERS)
    for kind in "kv"
}


def namespace(extra: str) -> Namespace:
    return Namespace.of(
        model="m",
        engine="test/1",
        cache_dtype="f16",
        layers=[LayerSpec(0, layer, HEADS, DIM, DIM) for layer in range(LAYERS)],
        extra=extra,
    )


LOSSY, EXACT = namespace("devices=CPU;kv=q8_0"), namespace("devices=CPU")


@pytest.fixture
def daemon() -> Iterator[SidecarProcess]:
    with short_directory() as directory:
        yield SidecarProcess(directory)


def rows(client: BlockClient, ns: Namespace) -> list[bytes]:
    with client.get(ns, client.match(ns, TOKENS)) as blocks:
        assert blocks.rows == len(TOKENS)
        return [bytes(block.segment(layer, kind)) for block in blocks for layer, kind in CACHE]


def test_rows_are_the_same_from_ram_and_disk_and_half_as_large(daemon: SidecarProcess) -> None:
    with daemon, BlockClient(daemon.socket, fail_open=False) as client:
        for ns in (LOSSY, EXACT):
            client.put(
                ns, TOKENS, lambda i: {at: r[i * 64 : i * 64 + 64] for at, r in CACHE.items()}
            )
        from_ram = rows(client, LOSSY)
        exact = rows(client, EXACT)
        daemon.wait_written()
    shutil.rmtree(daemon.ram_dir)
    files = {}
    for ns in (LOSSY, EXACT):
        below = daemon.local_dir / "v1" / ns.digest().hex()
        files[ns] = sum(path.stat().st_size for path in below.rglob("*.kvb"))
    assert files[LOSSY] < 0.65 * files[EXACT]
    with daemon, BlockClient(daemon.socket, fail_open=False) as client:
        assert rows(client, LOSSY) == from_ram
        assert rows(client, EXACT) == exact
        assert exact == [
            CACHE[at][start : start + 64].tobytes() for start in (0, 64, 128) for at in CACHE
        ]
        lossy = np.frombuffer(b"".join(from_ram), np.float16).astype(np.float32)
        error = np.abs(lossy - np.frombuffer(b"".join(exact), np.float16)).max()
        assert 0 < error < 5 / 127


def test_status_says_which_runner_is_lossy(daemon: SidecarProcess) -> None:
    with daemon, BlockClient(daemon.socket, fail_open=False) as client:
        for ns in (LOSSY, EXACT):
            client.put(
                ns, TOKENS, lambda i: {at: r[i * 64 : i * 64 + 64] for at, r in CACHE.items()}
            )
        assert daemon.process is not None
        pids = {LOSSY: os.getpid(), EXACT: daemon.process.pid}  # only the living are shown
        with daemon.channel() as channel:
            stub = rpc.BlockStoreStub(channel)
            for ns, pid in pids.items():
                report = pb.RunnerReport(pid=pid, model="m", tiered=True, namespace=ns.digest())
                stub.ReportRunner(report, timeout=10)
        assert list(daemon.stat().q8_0_namespaces) == [LOSSY.digest()]
        told = CliRunner().invoke(cli, ["status", "--socket", str(daemon.socket)]).output
        of_lossy, of_exact = told.split(f"runner {pids[EXACT]} ")
        assert "lossy: its rows are rounded to q8_0" in of_lossy
        assert "lossy" not in of_exact
