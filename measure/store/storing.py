"""Storing: from the first reservation until everything is on the disk, compared with one direct
write.

The sidecar is a process of its own, as it always is, so a client's work does not count as the
sidecar's time.
"""

from __future__ import annotations

import os
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Final

import grpc
import psutil

from measure.own_sidecar import sidecar
from measure.results import Ratio, Section
from measure.store.hardware import sequential_write_seconds
from measure.store.rig import ROWS, RandomBlocks, bench_directories
from ollama_tiering.bench.table import rate
from ollama_tiering.client.stream import Exchange
from ollama_tiering.errors import UsageError
from ollama_tiering.protocol import calls as rpc
from ollama_tiering.store import BlockOffer, TierKind
from ollama_tiering.store import block_store_pb2 as pb
from ollama_tiering.system.files import write_all
from ollama_tiering.system.listener import grpc_address

REPEATS: Final = 3
BATCH_BYTES: Final = 32 << 20  # reserved, filled and committed at a time, a block at least
_POLL_SECONDS: Final = 0.01  # each costs the machine a millisecond that storing could have
_MOST_SECONDS: Final = 600.0
_MEASURING_SECONDS: Final = 10.0
_SETTINGS: Final = "min_tokens = 1\ntail_seconds = 0\nmin_free_percent = 0\ndaily_write = 0"

File = tuple[BlockOffer, bytes]


def measure(
    disk: Path, block_bytes: list[int], total_bytes: int, say: Callable[[str], None]
) -> Section:
    ratios = []
    for size in block_bytes:
        name = f"blocks of {size >> 20} MiB"
        say(f"put, {name}")
        blocks = RandomBlocks.of(size, total_bytes)
        files = list(blocks.files())
        total = sum(len(data) for _, data in files)
        runs = [_once(disk, blocks, files, total) for _ in range(REPEATS)]
        client, seconds, busy, bare = (
            statistics.median(column) for column in zip(*runs, strict=True)
        )
        against = f"sequential direct write, {rate(total / bare)}"
        measured = (
            f"{rate(total / seconds)} (client done at {rate(total / client)}; "
            f"processors {1e3 * busy * 2**20 / total:.2f} ms/MiB)"
        )
        ratios.append(Ratio(f"put, {name}", measured, against, bare / seconds, 0.85))
    notes = [
        f"{total_bytes >> 20} MiB for every size of block; medians of {REPEATS} runs, what it is "
        "measured against in between.",
        "From the client's first reservation until every block is on the disk, synced and under "
        "its name. The client is a process of its own and writes into the RAM tier; its share is "
        f"in it. It reserves, fills and commits {BATCH_BYTES >> 20} MiB at a time.",
        "Processors: the time that sidecar and client spent on them, system calls included. There "
        f"are {os.cpu_count()}, so no run takes less than that part of it; the plain write needs "
        "next to none.",
        "Against one file of as many bytes, direct, in requests of 8 MiB, synced once at its end.",
    ]
    return Section("put", "Storing", "÷ direct write", ratios, notes)


def _once(
    disk: Path, blocks: RandomBlocks, files: Sequence[File], total: int
) -> tuple[float, float, float, float]:
    """Seconds until the client is done, seconds until all is on the disk, processor seconds
    meanwhile, and seconds of the plain write.
    """
    with bench_directories(disk, total) as (ram_dir, local_dir, other_file, budget_bytes):
        gigabytes = str(budget_bytes / 1e9)
        options = ["--ram-dir", str(ram_dir), "--ram-gb", gigabytes]
        options += ["--local", str(local_dir), "--local-gb", gigabytes]
        with (
            sidecar(options, _SETTINGS) as (_, process, socket),
            grpc.insecure_channel(grpc_address(socket)) as channel,
        ):
            stub = rpc.BlockStoreStub(channel)
            _wait_until_measured(stub)
            both = psutil.Process(process.pid), psutil.Process()
            before = sum(map(_processor_seconds, both))
            start = time.perf_counter()
            _put(stub, blocks, files)
            client = time.perf_counter() - start
            while _blocks_on_disk(stub) < len(files):
                if time.perf_counter() - start > _MOST_SECONDS:
                    raise RuntimeError("the blocks were not written down")
                time.sleep(_POLL_SECONDS)
            whole = time.perf_counter() - start
            busy = sum(map(_processor_seconds, both)) - before
        return client, whole, busy, sequential_write_seconds(other_file, total)


def _processor_seconds(process: psutil.Process) -> float:
    times = process.cpu_times()
    return float(times.user + times.system)


def _wait_until_measured(stub: rpc.BlockStoreStub) -> None:
    """In its first seconds a sidecar measures its tiers."""
    end = time.perf_counter() + _MEASURING_SECONDS
    while time.perf_counter() < end:
        tiers = stub.Stat(pb.StatRequest(), timeout=30).tiers
        if all(tier.write_bytes_per_second for tier in tiers):
            return
        time.sleep(_POLL_SECONDS)


def _put(stub: rpc.BlockStoreStub, blocks: RandomBlocks, files: Sequence[File]) -> None:
    fields = [pb.NamespaceField(name=name, value=value) for name, value in blocks.ns.fields()]
    with Exchange(stub.Put, _MOST_SECONDS) as exchange:
        exchange.send(
            pb.PutRequest(
                open=pb.PutOpen(
                    namespace=blocks.ns.digest(),
                    description=pb.Namespace(fields=fields),
                    block_tokens=ROWS,
                )
            )
        )
        for batch in _batches(files):
            offers = [
                pb.BlockOffer(key=c.key, parent=c.parent, file_bytes=c.file_bytes) for c, _ in batch
            ]
            answer = exchange.call(pb.PutRequest(reserve=pb.PutReserve(offers=offers)))
            ids = []
            for (_, data), reserved in zip(batch, answer.reserved.reservations, strict=True):
                if not reserved.path:
                    raise UsageError("the store has no room")
                fd = os.open(reserved.path, os.O_WRONLY | os.O_NOFOLLOW | os.O_CLOEXEC)
                try:
                    write_all(fd, 0, data)
                finally:
                    os.close(fd)
                ids.append(reserved.id)
            answer = exchange.call(pb.PutRequest(commit=pb.PutCommit(reservation_ids=ids)))
            for result in answer.committed.results:
                if not result.stored:
                    raise UsageError(f"the store refused a block: {result.reason}")


def _batches(files: Sequence[File]) -> Iterator[list[File]]:
    batch: list[File] = []
    for offer, data in files:
        if batch and sum(len(one) for _, one in batch) + len(data) > BATCH_BYTES:
            yield batch
            batch = []
        batch.append((offer, data))
    yield batch


def _blocks_on_disk(stub: rpc.BlockStoreStub) -> int:
    tiers = stub.Stat(pb.StatRequest(), timeout=30).tiers
    return sum(tier.blocks for tier in tiers if tier.tier == TierKind.LOCAL.value)
