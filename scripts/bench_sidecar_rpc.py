#!/usr/bin/env python3
"""Measures gRPC over a Unix socket: thread pool against asyncio, the same handlers and clients.

Server and clients are processes of their own. Prints unary latency (Has with 128 keys and a canned
answer of 128 blocks) and Put round trips on one stream (reserve, commit), for 1 and 4 clients. No
store is behind it: this is the transport alone.

    scripts/bench_sidecar_rpc.py [--seconds 3] [--out docs/measurements/sidecar-rpc.md]
"""

from __future__ import annotations

import argparse
import asyncio
import multiprocessing
import platform
import queue
import shlex
import statistics
import sys
import tempfile
import time
from collections.abc import AsyncIterator, Iterator
from concurrent import futures
from pathlib import Path
from typing import Any

import grpc
import grpc.aio

from ollama_tiering.bench.machine import begin, this_machine
from ollama_tiering.protocol.pb import block_store_pb2_grpc as rpc
from ollama_tiering.store.block.pb import block_store_pb2 as pb

KEYS = [bytes([i]) * 32 for i in range(128)]


def has_response() -> pb.HasResponse:
    blocks = [
        pb.BlockInfo(key=key, rows=64, block_rows=64, tier=pb.TIER_RAM, stored_bytes=7 << 20)
        for key in KEYS
    ]
    return pb.HasResponse(blocks=blocks, matched_tokens=128 * 64)


def put_response(request: pb.PutRequest) -> pb.PutResponse:
    if request.WhichOneof("op") == "reserve":
        reservation = pb.Reservation(
            outcome=pb.Reservation.OUTCOME_RESERVED, id=1, path=b"/dev/shm/x" * 12
        )
        return pb.PutResponse(reserved=pb.PutReserved(reservations=[reservation]))
    return pb.PutResponse(committed=pb.PutCommitted(results=[pb.Committed(stored=True)]))


class Threaded(rpc.BlockStoreServicer):  # type: ignore[misc]
    def Has(self, request: pb.HasRequest, context: Any) -> pb.HasResponse:
        return has_response()

    def Put(self, requests: Iterator[pb.PutRequest], context: Any) -> Iterator[pb.PutResponse]:
        for request in requests:
            yield put_response(request)


class Asynchronous(rpc.BlockStoreServicer):  # type: ignore[misc]
    async def Has(self, request: pb.HasRequest, context: Any) -> pb.HasResponse:
        return has_response()

    async def Put(
        self, requests: AsyncIterator[pb.PutRequest], context: Any
    ) -> AsyncIterator[pb.PutResponse]:
        async for request in requests:
            yield put_response(request)


def serve(kind: str, address: str, ready: Any) -> None:
    if kind == "threads":
        server = grpc.server(futures.ThreadPoolExecutor(max_workers=16))
        rpc.add_BlockStoreServicer_to_server(Threaded(), server)
        server.add_insecure_port(address)
        server.start()
        ready.set()
        server.wait_for_termination()
        return

    async def run() -> None:
        server = grpc.aio.server()
        rpc.add_BlockStoreServicer_to_server(Asynchronous(), server)
        server.add_insecure_port(address)
        await server.start()
        ready.set()
        await server.wait_for_termination()

    asyncio.run(run())


def client(address: str, what: str, seconds: float, results: Any) -> None:
    stub = rpc.BlockStoreStub(grpc.insecure_channel(address))
    request = pb.HasRequest(namespace=bytes(32), keys=KEYS, tokens=bytes(4 * 128 * 64))
    samples = []
    if what == "has":

        def once() -> None:
            stub.Has(request, timeout=10)
    else:
        outgoing: queue.SimpleQueue[pb.PutRequest] = queue.SimpleQueue()
        answers = stub.Put(iter(outgoing.get, None))
        offer = pb.BlockOffer(key=KEYS[0], parent=KEYS[1], file_bytes=7 << 20)
        reserve = pb.PutRequest(reserve=pb.PutReserve(offers=[offer]))
        commit = pb.PutRequest(commit=pb.PutCommit(reservation_ids=[1]))

        def once() -> None:
            outgoing.put(reserve)
            next(answers)
            outgoing.put(commit)
            next(answers)

    for _ in range(50):
        once()
    end = time.perf_counter() + seconds
    while (start := time.perf_counter()) < end:
        once()
        samples.append(time.perf_counter() - start)
    results.put(samples)
    if what == "put":
        outgoing.put(None)  # type: ignore[arg-type]


def measure(kind: str, what: str, clients: int, seconds: float) -> str:
    context = multiprocessing.get_context("spawn")
    with tempfile.TemporaryDirectory() as directory:
        address = f"unix:{directory}/s"
        ready, results = context.Event(), context.Queue()
        server = context.Process(target=serve, args=(kind, address, ready), daemon=True)
        server.start()
        ready.wait(30)
        workers = [
            context.Process(target=client, args=(address, what, seconds, results))
            for _ in range(clients)
        ]
        for worker in workers:
            worker.start()
        samples = [sample for _ in workers for sample in results.get()]
        for worker in workers:
            worker.join()
        server.terminate()
        server.join()
    cut = statistics.quantiles(samples, n=100)
    rate = len(samples) / seconds
    return (
        f"| {kind} | {what} | {clients} | {cut[49] * 1e6:.0f} | {cut[98] * 1e6:.0f} | {rate:.0f} |"
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seconds", type=float, default=3.0)
    parser.add_argument("--out", type=Path)
    given = parser.parse_args()
    began = begin()
    rows = [
        measure(kind, what, clients, given.seconds)
        for what in ("has", "put")
        for clients in (1, 4)
        for kind in ("threads", "asyncio")
    ]
    versions = f"Python {platform.python_version()}, grpcio {grpc.__version__}"
    lines = [
        "# Sidecar: thread pool or asyncio",
        "",
        *this_machine(began).lines(versions),
        f"- Command: `{shlex.join(['scripts/bench_sidecar_rpc.py', *sys.argv[1:]])}`",
        "",
        "Server and clients are Python processes on one machine, over a Unix socket. `has`: one "
        "unary call with 128 keys, answered with 128 blocks. `put`: reserve, answer, commit, "
        "answer on one open stream (two round trips per figure). No store behind it: this is the "
        "transport alone.",
        "",
        "| server | call | clients | p50 µs | p99 µs | calls/s in all |",
        "|---|---|---|---|---|---|",
        *rows,
    ]
    text = "\n".join(lines) + "\n"
    print(text)
    if given.out:
        given.out.write_text(text, encoding="utf-8")


if __name__ == "__main__":
    main()
