"""What the tests of abuse share: a sidecar that is watched, and clients that behave badly."""

from __future__ import annotations

import statistics
import time
from typing import Any

import grpc
import psutil

from measure.store import samples
from ollama_tiering.protocol import calls as rpc
from ollama_tiering.store.block.key import prefix_chain, tokens_to_bytes
from ollama_tiering.store.block.pb import block_store_pb2 as pb
from tests.sidecar import PutStream, SidecarProcess

NS = samples.namespace(layers=1)
WIDE = samples.namespace("wide", kv_heads=8, head_dim=4096, layers=4)  # blocks of 2 MiB
HIT_TOKENS = list(range(64))


class Watched:
    """Memory, descriptors and log of a sidecar, from a moment on."""

    def __init__(self, daemon: SidecarProcess) -> None:
        assert daemon.process is not None
        self._daemon = daemon
        self._process = psutil.Process(daemon.process.pid)
        self._rss_bytes = self._process.memory_info().rss
        self._descriptors = self._process.num_fds()

    @property
    def grown_bytes(self) -> int:
        """Files that are mapped do not count: nobody maps them here."""
        return int(self._process.memory_info().rss) - self._rss_bytes

    @property
    def more_descriptors(self) -> int:
        return int(self._process.num_fds()) - self._descriptors

    def wait_for_descriptors(self, most: int, seconds: float = 10.0) -> None:
        """Waits: the sidecar looks at connections that never call once a second."""
        end = time.monotonic() + seconds
        while self.more_descriptors > most:
            assert time.monotonic() < end, f"{self.more_descriptors} more descriptors"
            time.sleep(0.02)

    def lines(self, text: str) -> int:
        return sum(text in line for line in self._daemon.lines)


def store(daemon: SidecarProcess, ns: Any, tokens: list[int]) -> list[samples.SampleBlock]:
    blocks = samples.sequence(ns, tokens)
    with daemon.channel() as channel:
        stream = PutStream(rpc.BlockStoreStub(channel), ns)
        size = 1 if ns is WIDE else 500
        for start in range(0, len(blocks), size):
            assert all(result.stored for result in stream.put(blocks[start : start + size]))
        stream.close()
    return blocks


def made_up_offers(count: int, file_bytes: int, mark: int = 0) -> list[pb.BlockOffer]:
    return [
        pb.BlockOffer(
            key=bytes([mark]) * 4 + index.to_bytes(28, "big"),
            parent=NS.digest(),
            file_bytes=file_bytes,
        )
        for index in range(count)
    ]


def status_of(call: Any) -> grpc.StatusCode:
    """With which status a call or stream of answers ends."""
    try:
        for _ in call:
            pass
    except grpc.RpcError as error:
        code: grpc.StatusCode = error.code()  # type: ignore[attr-defined]
        return code
    return grpc.StatusCode.OK


class Hits:
    """A well-behaved client that finds everything in RAM."""

    def __init__(self, daemon: SidecarProcess) -> None:
        self._blocks = store(daemon, NS, HIT_TOKENS)
        self._channel = daemon.channel()
        self._stub = rpc.BlockStoreStub(self._channel)

    def median_seconds(self, calls: int = 100, tries: int = 3) -> float:
        """Of look-up, lease and release; the best of some tries, for others use the machine too."""
        return min(statistics.median(self._seconds() for _ in range(calls)) for _ in range(tries))

    def _seconds(self) -> float:
        data = tokens_to_bytes(HIT_TOKENS)
        keys = prefix_chain(NS.digest(), data, 4)
        has = pb.HasRequest(namespace=NS.digest(), keys=keys, tokens=data, block_tokens=4)
        start = time.perf_counter()
        assert self._stub.Has(has, timeout=10).matched_tokens == len(HIT_TOKENS)
        get = pb.GetRequest(namespace=NS.digest(), keys=keys, batch=True)
        (answer,) = self._stub.Get(get, timeout=10)
        self._stub.Release(pb.ReleaseRequest(lease_id=answer.lease_id), timeout=10)
        seconds = time.perf_counter() - start
        assert answer.found
        assert answer.tier == pb.TIER_RAM
        return seconds

    def close(self) -> None:
        self._channel.close()
