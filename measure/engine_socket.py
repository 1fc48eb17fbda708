"""Measures look-ups on the engine socket beside the same look-up through gRPC, in turns.

One sidecar, one chain of made-up rows in its RAM tier. On the engine socket one MATCH names all
files with the place and the checksums of their segments, and the sidecar computes the keys. Through
gRPC that is a Has and a Get, which name the same files without their checksums; the keys were
computed before. Leases are released outside of what is measured. Then the same on a disk, by a
sidecar that was just started: once it has read the headers of the files, and once it knows them.
Each figure is a median with its quartiles.

    python -m measure.engine_socket [--tokens 2048,8192,32768] [--layers 32] [--rounds 50]
                                    [--starts 9] [--out docs/measurements/engine-socket.md]
"""

from __future__ import annotations

import os
import random
import statistics
import struct
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import grpc

from measure.own_sidecar import sidecar
from measure.running import arguments, publish
from ollama_tiering.bench.machine import begin
from ollama_tiering.client.engine_client import EngineClient
from ollama_tiering.protocol import calls as rpc
from ollama_tiering.protocol.engine import messages as m
from ollama_tiering.protocol.limits import MAX_MESSAGE_BYTES
from ollama_tiering.protocol.loaded_file import LoadedFile
from ollama_tiering.store import BlockKey, align, as_namespace, crc32c, prefix_chain
from ollama_tiering.store import block_store_pb2 as pb
from ollama_tiering.system.listener import grpc_address

ROW_BYTES = 16  # of each plane: what lies in the files does not matter here
BLOCK_TOKENS = 64
BOUND_MS = 10.0
QUIET_SECONDS = 2.0  # after a start


def hello(layers: int) -> m.Hello:
    fields = (("model", "bench"), ("engine", "bench/1+0"), ("flash_attention", "on"))
    geometry = [m.Layer(0, i, 0, 0, 1, 8, 8, ROW_BYTES, ROW_BYTES) for i in range(layers)]
    files = (LoadedFile.of(__file__),)  # any file
    return m.Hello(fields, tuple(geometry), min_tokens=1, gate=m.GateMode.RESTORE, files=files)


def store(engine: EngineClient, tokens: bytes, planes: int) -> None:
    while True:
        planned = engine.plan(m.Plan(tokens))
        filled = tuple(fill(file, planes) for file in planned.files)
        if filled and any(engine.commit(m.Commit(filled)).reasons):
            raise RuntimeError("a block was not stored")
        if planned.outcome is m.EngineOutcome.ALL:
            return
        if planned.outcome is not m.EngineOutcome.MORE:
            raise RuntimeError(f"{planned.outcome.name} {planned.reason}")


def fill(file: m.EngineReserved, planes: int) -> m.EngineFilled:
    segment = os.urandom(file.rows * ROW_BYTES)
    fd = os.open(file.path, os.O_WRONLY | os.O_NOFOLLOW)
    try:
        for plane in range(planes):
            os.pwrite(fd, segment, file.payload_offset + plane * align(len(segment)))
    finally:
        os.close(fd)
    return m.EngineFilled(
        file.reservation_id, struct.pack(f"<{planes}I", *[crc32c(segment)] * planes)
    )


Call = Callable[[], tuple[int, Callable[[], object]]]  # files that were named, and their release


def by_engine(engine: EngineClient, tokens: bytes) -> Call:
    def call() -> tuple[int, Callable[[], object]]:
        found = engine.match(m.EngineMatch(tokens))
        if found.pending:
            found = engine.wait(found.lease_id)
        return len(found.files), lambda: engine.release(found.lease_id)

    return call


def by_grpc(stub: Any, namespace: bytes, tokens: bytes) -> Call:
    keys: list[BlockKey] = prefix_chain(as_namespace(namespace), tokens, BLOCK_TOKENS)
    has = pb.HasRequest(namespace=namespace, keys=keys, tokens=tokens, block_tokens=BLOCK_TOKENS)

    def call() -> tuple[int, Callable[[], object]]:
        found = [block.key for block in stub.Has(has, timeout=30).blocks]
        get = pb.GetRequest(namespace=namespace, keys=found, batch=True)
        answers = [one for batch in stub.Get(get, timeout=30) for one in (batch, *batch.more)]
        lease = pb.ReleaseRequest(lease_id=answers[0].lease_id)
        return sum(answer.found for answer in answers), lambda: stub.Release(lease, timeout=30)

    return call


def in_turns(
    calls: list[Call], rounds: int, files: int, pid: int
) -> tuple[list[list[float]], list[list[float]]]:
    """Milliseconds of each call, whose order changes in every round: those that pass, and those of
    the sidecar's processor time.
    """
    passed: list[list[float]] = [[] for _ in calls]
    worked: list[list[float]] = [[] for _ in calls]
    clock = (~pid << 3) | 2  # of Linux: the processor time of another process
    for _ in range(rounds):
        order = list(range(len(calls)))
        random.shuffle(order)
        for which in order:
            start, before = time.perf_counter(), time.clock_gettime(clock)
            found, release = calls[which]()
            passed[which].append(1e3 * (time.perf_counter() - start))
            worked[which].append(1e3 * (time.clock_gettime(clock) - before))
            release()
            if found != files:
                raise RuntimeError(f"{found} files were named, of {files}")
    return passed, worked


@contextmanager
def both(socket: str, layers: int) -> Iterator[tuple[EngineClient, Any]]:
    options = [
        ("grpc.max_receive_message_length", MAX_MESSAGE_BYTES),
        ("grpc.max_send_message_length", MAX_MESSAGE_BYTES),
    ]
    with (
        EngineClient(f"{socket}.engine", hello(layers), timeout_seconds=60) as engine,
        grpc.insecure_channel(grpc_address(socket), options=options) as channel,
    ):
        yield engine, rpc.BlockStoreStub(channel)


def row(socket: str, pid: int, layers: int, tokens: int, rounds: int) -> list[str]:
    data = struct.pack(f"<{tokens}i", *(random.randrange(1 << 17) for _ in range(tokens)))
    files = -(-tokens // BLOCK_TOKENS)
    with both(socket, layers) as (engine, stub):
        store(engine, data, 2 * layers)
        assert engine.welcome is not None
        through = by_grpc(stub, engine.welcome.namespace, data)

        def first() -> tuple[int, Callable[[], object]]:
            """By a connection of its own: nothing of the chain is known."""
            other = EngineClient(f"{socket}.engine", hello(layers), timeout_seconds=60)
            return by_engine(other, data)()[0], other.close

        calls = [by_engine(engine, data), first, through]
        for call in calls:
            call()[1]()
        measured = in_turns(calls, rounds, files, pid)
    names = "as the client waits", "processor time of the sidecar"
    return [
        f"| {tokens:,} | {files} | {n} | {line(m)} |" for n, m in zip(names, measured, strict=True)
    ]


def after_a_start(options: list[str], layers: int, tokens: int, starts: int) -> str:
    """The first look-up of a sidecar that knows no header, and the next."""
    data = struct.pack(f"<{tokens}i", *(random.randrange(1 << 17) for _ in range(tokens)))
    files = -(-tokens // BLOCK_TOKENS)
    passed: list[list[float]] = [[], []]
    for number in range(starts + 1):
        with (
            sidecar(options) as (_, _, socket),
            EngineClient(f"{socket}.engine", hello(layers), timeout_seconds=60) as engine,
        ):
            if number == 0:
                store(engine, data, 2 * layers)
                continue
            time.sleep(QUIET_SECONDS)
            for turn in passed:
                start = time.perf_counter()
                found, release = by_engine(engine, data)()
                turn.append(1e3 * (time.perf_counter() - start))
                release()
                if found != files:
                    raise RuntimeError(f"{found} files were named, of {files}")
    first, again = (statistics.median(one) for one in passed)
    each = 1e3 * (first - again) / files
    return f"| {tokens:,} | {files} | {' | '.join(spread(one) for one in passed)} | {each:.0f} |"


def line(milliseconds: list[list[float]]) -> str:
    again, new, grpc_ms = (statistics.median(one) for one in milliseconds)
    shown = " | ".join(spread(one) for one in milliseconds)
    return f"{shown} | {again / grpc_ms:.2f} | {new / grpc_ms:.2f} | {new / BOUND_MS:.2f}"


def spread(milliseconds: list[float]) -> str:
    low, middle, high = statistics.quantiles(milliseconds, n=4)
    return f"{middle:.2f} ({low:.2f} to {high:.2f})"


def main() -> None:
    parser = arguments(__doc__)
    parser.add_argument("--tokens", default="2048,8192,32768")
    parser.add_argument("--layers", type=int, default=32)
    parser.add_argument("--rounds", type=int, default=50)
    parser.add_argument("--starts", type=int, default=9)
    given = parser.parse_args()
    began = begin()
    with tempfile.TemporaryDirectory(dir="/dev/shm") as ram, tempfile.TemporaryDirectory() as local:
        options = ["--ram-dir", f"{ram}/r", "--ram-gb", "2", "--local", f"{local}/l"]
        with sidecar([*options, "--local-gb", "0"]) as (_, process, socket):
            counts = [int(count) for count in given.tokens.split(",")]
            rows = []
            for count in counts:
                rows += row(socket, process.pid, given.layers, count, given.rounds)
        on_disk = ["--ram-dir", f"{ram}/r", "--ram-gb", "0", "--local", f"{local}/d"]
        on_disk += ["--local-gb", "3"]
        starts = [after_a_start(on_disk, given.layers, n, given.starts) for n in counts]
    lines = [
        "",
        f"A chain in the RAM tier, {given.layers} layers, {given.rounds} rounds in turns; median "
        "and quartiles in milliseconds, with clients in Python. The bound is for 32,768 tokens on "
        "a machine that does nothing else; processor time is the part that does not depend on "
        "what else it does. Engine "
        "socket: MATCH; files are named with their checksums, and the sidecar "
        "computes the keys: of all blocks on a new connection, whose making and hello count, too; "
        "of none if the connection asked for the prompt before. gRPC: Has and Get, which "
        "name the same files without checksums, and take keys that were computed before.",
        "",
        f"| tokens | files | milliseconds | engine socket, asked before | engine socket, new "
        f"connection | gRPC | before ÷ gRPC | new ÷ gRPC | new ÷ bound of {BOUND_MS:.0f} ms |",
        "|---|---|---|---|---|---|---|---|---|",
        *rows,
        "",
        f"Files on a disk, in the page cache; {given.starts} starts of the sidecar, of each the "
        "first look-up, which reads and checks the header of every file, and the next, which "
        "knows them.",
        "",
        "| tokens | files | first, ms | next, ms | microseconds more for each file |",
        "|---|---|---|---|---|",
        *starts,
    ]
    grpcio, title = f"grpcio {grpc.__version__}", "Look-ups on the engine socket"
    publish("engine_socket", title, began, grpcio, lines, given.out)


if __name__ == "__main__":
    main()
