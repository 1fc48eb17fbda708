"""Look-ups among many records: inside the store and through gRPC. Records have no files here."""

from __future__ import annotations

import asyncio
import gc
import hashlib
import multiprocessing
import statistics
import struct
import tempfile
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any, Final

import grpc
import grpc.aio

from measure.results import Ratio, Section
from measure.store import samples
from ollama_tiering.protocol import calls as rpc
from ollama_tiering.sidecar.peer import PeerGuard
from ollama_tiering.sidecar.server import make_entrance
from ollama_tiering.sidecar.service import BlockStoreService
from ollama_tiering.store import (
    BlockKey,
    BlockRecord,
    MemoryTier,
    TieredStore,
    TierKind,
    prefix_chain,
)
from ollama_tiering.store import block_store_pb2 as pb
from ollama_tiering.system.listener import grpc_address

BLOCK_TOKENS: Final = 64
CHAIN: Final = 64  # blocks of one conversation, and keys of one look-up
NS: Final = samples.namespace("scale", block_tokens=BLOCK_TOKENS, layers=1)
NAMESPACE: Final = NS.digest()
_CALLS: Final = 2000
_INSIDE_SECONDS, _GRPC_SECONDS = 300e-6, 1e-3


def measure(records: int, say: Callable[[str], None]) -> Section:
    """Takes about 1 kB of memory for every record, twice in succession."""
    say(f"look-ups among {records:,} blocks, in the store")
    inside = _inside(records)
    say(f"look-ups among {records:,} blocks, through gRPC")
    through, empty = _through_grpc(records)
    what = f"look-up of {CHAIN} keys"
    ratios = [
        _ratio(f"{what}, in the store", inside, _INSIDE_SECONDS, 1.0),
        _ratio(f"{what}, through gRPC", through, _GRPC_SECONDS, 1.0),
        _ratio("a call that does nothing, through gRPC", empty, _GRPC_SECONDS, None),
    ]
    notes = [
        f"{_CALLS:,} look-ups of {CHAIN} keys each, whole conversations of {CHAIN} blocks among "
        f"{records:,} blocks. The server is a process of its own on a Unix socket."
    ]
    return Section("lookup", "Looking up", "p50 ÷ bound", ratios, notes)


def _ratio(what: str, seconds: list[float], allowed: float, bound: float | None) -> Ratio:
    cuts = statistics.quantiles(seconds, n=100)
    measured = f"p50 {1e6 * cuts[49]:.0f} µs, p99 {1e6 * cuts[98]:.0f} µs"
    return Ratio(what, measured, f"{1e6 * allowed:.0f} µs", cuts[49] / allowed, bound, at_most=True)


def chain_tokens(number: int) -> list[int]:
    """The tokens of one conversation: CHAIN whole blocks that no other one shares."""
    seed = hashlib.shake_128(number.to_bytes(8, "little")).digest(4 * BLOCK_TOKENS * CHAIN)
    return [value >> 1 for (value,) in struct.iter_unpack("<I", seed)]


def _records(blocks: int) -> Iterator[BlockRecord]:
    for number in range(-(-blocks // CHAIN)):
        tokens = struct.pack(f"<{BLOCK_TOKENS * CHAIN}i", *chain_tokens(number))
        parent: bytes = NAMESPACE
        for index, key in enumerate(prefix_chain(NAMESPACE, tokens, BLOCK_TOKENS)):
            inside = tokens[4 * BLOCK_TOKENS * index : 4 * BLOCK_TOKENS * (index + 1)]
            yield BlockRecord(key, NAMESPACE, parent, inside, BLOCK_TOKENS, 7 << 20, time.time())
            parent = key


def _store_of(blocks: int) -> TieredStore:
    """A store whose books name blocks without files."""
    store = TieredStore([(MemoryTier(TierKind.LOCAL), 1 << 60)], background=False, measure=False)
    level = store.state.levels[0]
    for record in _records(blocks):
        store.state.add_copy(record, level, record.file_bytes)
    store.state.index_changed.clear()
    return store


def prompts(blocks: int, calls: int = _CALLS) -> Iterator[tuple[list[BlockKey], bytes]]:
    """Chains spread over all that are stored."""
    chains = max(1, blocks // CHAIN)
    for call in range(calls):
        tokens = struct.pack(f"<{BLOCK_TOKENS * CHAIN}i", *chain_tokens(call * 7919 % chains))
        yield prefix_chain(NAMESPACE, tokens, BLOCK_TOKENS), tokens


def has_request(keys: list[BlockKey], tokens: bytes) -> pb.HasRequest:
    return pb.HasRequest(namespace=NAMESPACE, keys=keys, tokens=tokens, block_tokens=BLOCK_TOKENS)


def _timed(calls: Iterator[Callable[[], object]]) -> list[float]:
    seconds = []
    for call in calls:
        start = time.perf_counter()
        call()
        seconds.append(time.perf_counter() - start)
    return seconds


def _check(rows: int) -> None:
    if rows != BLOCK_TOKENS * CHAIN:
        raise RuntimeError(f"{rows} rows were found of {BLOCK_TOKENS * CHAIN}")


def _inside(blocks: int) -> list[float]:
    store = _store_of(blocks)
    gc.freeze()  # as a sidecar's books: its collector does not walk them at every call

    def call(keys: list[BlockKey], tokens: bytes) -> None:
        _check(sum(block.rows for block in store.match(NAMESPACE, keys, tokens, BLOCK_TOKENS)))

    try:
        return _timed(partial(call, *prompt) for prompt in prompts(blocks))
    finally:
        store.close()
        gc.unfreeze()


def _serve(socket: str, blocks: int, ready: Any) -> None:
    async def run() -> None:
        server, entrance = grpc.aio.server(), make_entrance(PeerGuard(Path(socket)))
        with ThreadPoolExecutor(2) as pool:
            service = BlockStoreService(_store_of(blocks), pool)
            rpc.add_to_server(service, entrance)
            server.add_generic_rpc_handlers((entrance,))
            server.add_insecure_port(grpc_address(socket))
            await server.start()
            gc.freeze()
            ready.set()
            await server.wait_for_termination()

    asyncio.run(run())


def _through_grpc(blocks: int) -> tuple[list[float], list[float]]:
    """Seconds of look-ups, and of calls that the server answers at once."""
    context = multiprocessing.get_context("spawn")
    with tempfile.TemporaryDirectory() as directory:
        socket = f"{directory}/s"
        ready = context.Event()
        server = context.Process(target=_serve, args=(socket, blocks, ready), daemon=True)
        server.start()
        try:
            if not ready.wait(600):
                raise RuntimeError("the server did not start")
            with grpc.insecure_channel(grpc_address(socket)) as channel:
                stub = rpc.BlockStoreStub(channel)

                def call(request: pb.HasRequest) -> None:
                    _check(stub.Has(request, timeout=30).matched_tokens)

                look_ups = _timed(partial(call, has_request(*prompt)) for prompt in prompts(blocks))
                unknown = pb.ReleaseRequest(lease_id=1)
                empty = _timed(partial(stub.Release, unknown, timeout=30) for _ in range(_CALLS))
                return look_ups, empty
        finally:
            server.terminate()
            server.join()
