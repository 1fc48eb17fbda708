#!/usr/bin/env python3
"""Measures the store at scale: start, memory, look-ups, with 10^5 block files and 10^6 records.

Block files are small (one layer, a few bytes a row) but real: 64 tokens, headers, checksums, on a
real disk. Records without files stand for the rest where only the books are asked. Prints Markdown.

    scripts/bench_store_scale.py [--directory DIR] [--files 100000] [--records 1000000]
"""

from __future__ import annotations

import argparse
import asyncio
import gc
import hashlib
import json
import multiprocessing
import os
import shutil
import signal
import statistics
import struct
import subprocess
import sys
import tempfile
import time
import tracemalloc
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any

import grpc
import grpc.aio
import psutil

from ollama_tiering.bench.machine import this_machine
from ollama_tiering.config import format_size
from ollama_tiering.sidecar.pb import block_store_pb2_grpc as rpc
from ollama_tiering.sidecar.peer import PeerGuard
from ollama_tiering.sidecar.server import _PeerInterceptor
from ollama_tiering.sidecar.service import BlockStoreService
from ollama_tiering.store import samples
from ollama_tiering.store.fs_tier import FsTier
from ollama_tiering.store.index import INDEX_NAME
from ollama_tiering.store.key import BlockKey, prefix_chain
from ollama_tiering.store.memory_tier import MemoryTier
from ollama_tiering.store.pb import block_store_pb2 as pb
from ollama_tiering.store.tier import TierKind
from ollama_tiering.store.tiered import TieredStore
from ollama_tiering.store.tree import BlockRecord

BLOCK_TOKENS, CHAIN, KEYS = 64, 64, 64
NS = samples.namespace("scale", block_tokens=BLOCK_TOKENS, layers=1)
NAMESPACE = NS.digest()
CALLS = 2000
BUDGET_BYTES = 1 << 40


def chain_tokens(number: int) -> list[int]:
    """Of one conversation: CHAIN whole blocks that no other one shares."""
    seed = hashlib.shake_128(number.to_bytes(8, "little")).digest(4 * BLOCK_TOKENS * CHAIN)
    return [value >> 1 for (value,) in struct.iter_unpack("<I", seed)]


def make_files(tier: FsTier, blocks: int) -> None:
    for number in range(-(-blocks // CHAIN)):
        for block in samples.sequence(NS, chain_tokens(number))[: blocks - number * CHAIN]:
            path = tier.path(NAMESPACE, block.key)
            assert path is not None
            path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
            path.write_bytes(block.data)


def records(blocks: int) -> Iterator[BlockRecord]:
    for number in range(-(-blocks // CHAIN)):
        tokens = struct.pack(f"<{BLOCK_TOKENS * CHAIN}i", *chain_tokens(number))
        parent: bytes = NAMESPACE
        for index, key in enumerate(prefix_chain(NAMESPACE, tokens, BLOCK_TOKENS)):
            inside = tokens[4 * BLOCK_TOKENS * index : 4 * BLOCK_TOKENS * (index + 1)]
            yield BlockRecord(key, NAMESPACE, parent, inside, BLOCK_TOKENS, 7 << 20, time.time())
            parent = key


def store_of(blocks: int) -> TieredStore:
    """Books without files."""
    tier = MemoryTier(TierKind.LOCAL)
    store = TieredStore([(tier, 1 << 60)], background=False, measure=False)
    level = store._state.levels[0]
    for record in records(blocks):
        store._state.add_copy(record, level, record.file_bytes)
    store._state.index_changed.clear()
    return store


def prompts(blocks: int) -> Iterator[tuple[list[BlockKey], bytes]]:
    """Chains spread over all that are stored."""
    chains = max(1, blocks // CHAIN)
    for call in range(CALLS):
        tokens = struct.pack(f"<{BLOCK_TOKENS * CHAIN}i", *chain_tokens(call * 7919 % chains))
        yield prefix_chain(NAMESPACE, tokens, BLOCK_TOKENS)[:KEYS], tokens


def has_request(keys: list[BlockKey], tokens: bytes) -> pb.HasRequest:
    return pb.HasRequest(namespace=NAMESPACE, keys=keys, tokens=tokens, block_tokens=BLOCK_TOKENS)


def timed(calls: Iterator[Callable[[], int]]) -> str:
    seconds = []
    for call in calls:
        start = time.perf_counter()
        rows = call()
        seconds.append(time.perf_counter() - start)
        assert rows == BLOCK_TOKENS * CHAIN, rows
    cuts = statistics.quantiles(seconds, n=100)
    return f"p50 {1e6 * cuts[49]:.0f} µs, p99 {1e6 * cuts[98]:.0f} µs"


def look_up_inside(blocks: int) -> str:
    store = store_of(blocks)
    gc.freeze()

    def call(keys: list[BlockKey], tokens: bytes) -> int:
        found = store.match(NAMESPACE, keys, tokens, BLOCK_TOKENS)
        return sum(block.rows for block in found)

    return timed(partial(call, *prompt) for prompt in prompts(blocks))


def serve(socket: str, blocks: int, ready: Any) -> None:
    """A server process over books without files."""

    async def run() -> None:
        server = grpc.aio.server(interceptors=[_PeerInterceptor(PeerGuard(Path(socket)))])
        with ThreadPoolExecutor(2) as pool:
            rpc.add_BlockStoreServicer_to_server(BlockStoreService(store_of(blocks), pool), server)
            server.add_insecure_port(f"unix:{socket}")
            await server.start()
            gc.freeze()
            ready.set()
            await server.wait_for_termination()

    asyncio.run(run())


def look_up_grpc(blocks: int) -> str:
    context = multiprocessing.get_context("spawn")
    with tempfile.TemporaryDirectory() as directory:
        socket = f"{directory}/s"
        ready = context.Event()
        server = context.Process(target=serve, args=(socket, blocks, ready), daemon=True)
        server.start()
        assert ready.wait(600)
        try:
            with grpc.insecure_channel(f"unix:{socket}") as channel:
                stub = rpc.BlockStoreStub(channel)

                def call(request: pb.HasRequest) -> int:
                    answer: pb.HasResponse = stub.Has(request, timeout=30)
                    return answer.matched_tokens

                return timed(partial(call, has_request(*prompt)) for prompt in prompts(blocks))
        finally:
            server.terminate()
            server.join()


def bytes_per_record(blocks: int) -> float:
    tracemalloc.start()
    before, _ = tracemalloc.get_traced_memory()
    store = store_of(blocks)
    after, _ = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    return (after - before) / len(store._state.tree)


def start(directory: Path) -> dict[str, float]:
    """Opens the store in a process of its own: seconds until it answers, and until all is known."""
    script = f"""
import json, sys, time, psutil
from pathlib import Path
from ollama_tiering.store.fs_tier import FsTier
from ollama_tiering.store.tier import TierKind
from ollama_tiering.store.tiered import TieredStore
begin = time.perf_counter()
tier = FsTier(TierKind.LOCAL, Path({str(directory)!r}))
index = Path({str(directory)!r}) / {INDEX_NAME!r}
store = TieredStore([(tier, {BUDGET_BYTES})], index_path=index, measure=False)
answers = time.perf_counter() - begin
known = len(store._state.tree)
while not store._state.levels[0].surveyed:
    time.sleep(0.01)
counted = time.perf_counter() - begin
while store._survey_thread.is_alive():
    time.sleep(0.01)
done = time.perf_counter() - begin
blocks = len(store._state.tree)
store.close()
print(json.dumps(dict(answers=answers, known=known, counted=counted, done=done, blocks=blocks)))
"""
    finished = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, check=True
    )
    answer: dict[str, float] = json.loads(finished.stdout.splitlines()[-1])
    return answer


def sidecar_memory(directory: Path) -> tuple[float, int]:
    """Seconds until a real sidecar is ready, and its resident memory after look-ups."""
    with tempfile.TemporaryDirectory() as run:
        command = [sys.executable, "-m", "ollama_tiering", "sidecar", "--socket", f"{run}/s"]
        command += ["--ram-gb", "0", "--local", str(directory), "--local-gb", "1024"]
        begin = time.perf_counter()
        process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
        try:
            assert process.stdout is not None
            line = process.stdout.readline()
            seconds = time.perf_counter() - begin
            assert "ready" in line, line
            with grpc.insecure_channel(f"unix:{run}/s") as channel:
                stub = rpc.BlockStoreStub(channel)
                while not stub.Stat(pb.StatRequest(), timeout=30).tiers[0].surveyed:
                    time.sleep(0.1)
                for keys, tokens in list(prompts(CHAIN * 100))[:500]:
                    stub.Has(has_request(keys, tokens), timeout=30)
            return seconds, psutil.Process(process.pid).memory_info().rss
        finally:
            process.send_signal(signal.SIGTERM)
            process.wait(60)


def drop_page_cache() -> bool:
    """Only root may; dentries and inodes too, so that a scan has to ask the disk."""
    os.sync()
    try:
        Path("/proc/sys/vm/drop_caches").write_text("3\n", encoding="ascii")
    except OSError:
        return False
    return True


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--directory", type=Path, help="where the block files go (deleted after)")
    parser.add_argument("--files", type=int, default=100_000)
    parser.add_argument("--records", type=int, default=1_000_000)
    parser.add_argument("--cold", action="store_true", help="drop the machine's page cache too")
    options = parser.parse_args()
    machine = this_machine()
    print(f"{machine.date}, {machine}, code {machine.code}, load {os.getloadavg()[0]:.1f}\n")
    print("| what | measured | bound |\n|---|---|---|")
    size = options.records
    inside = look_up_inside(size)
    print(f"| look-up of {KEYS} keys, {size:,} blocks, in the store | {inside} | 300 µs |")
    print(f"| … through gRPC | {look_up_grpc(size)} | 1 ms |", flush=True)
    gc.unfreeze()
    gc.collect()
    print(f"| memory of one block's books | {bytes_per_record(100_000):.0f} bytes | |", flush=True)
    directory = Path(tempfile.mkdtemp(dir=options.directory))
    try:
        tier = FsTier(TierKind.LOCAL, directory / "local")
        make_files(tier, options.files)
        tier.close()
        name = f"{options.files:,} files"
        cold = options.cold and drop_page_cache()
        first = start(directory / "local")
        how = "cold" if cold else "warm"
        print(
            f"| start, {name}, no index, {how} | answers after {first['answers']:.2f} s with "
            f"{first['known']:,.0f} blocks, writes after {first['counted']:.2f} s, "
            f"all {first['blocks']:,.0f} known after {first['done']:.2f} s | |"
        )
        for how in ("cold", "warm"):
            if how == "cold" and not (options.cold and drop_page_cache()):
                continue
            again = start(directory / "local")
            print(
                f"| start, {name}, with index, {how} | answers after {again['answers']:.2f} s with "
                f"{again['known']:,.0f} blocks, writes after {again['counted']:.2f} s | 5 s |",
                flush=True,
            )
        index = sum(p.stat().st_size for p in (directory / "local").glob(f"{INDEX_NAME}*"))
        print(f"| index, {name} | {format_size(index)} | |")
        seconds, memory = sidecar_memory(directory / "local")
        print(f"| sidecar ready, {name} | {seconds:.2f} s | 5 s |")
        print(f"| memory of that sidecar | {format_size(memory)} | 300 MB |")
    finally:
        shutil.rmtree(directory, ignore_errors=True)


if __name__ == "__main__":
    main()
