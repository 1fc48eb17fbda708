"""A sidecar over very many small block files: how soon it answers, how much memory it takes, and
whether that stays so while clients put and get for as long as wanted.
"""

from __future__ import annotations

import contextlib
import shutil
import statistics
import subprocess
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Final

import grpc
import numpy as np
import psutil

from measure.own_sidecar import sidecar
from measure.results import Ratio, Section
from measure.store import samples
from measure.store.looking_up import (
    BLOCK_TOKENS,
    CHAIN,
    NS,
    chain_tokens,
    has_request,
    prompts,
)
from ollama_tiering.client import BlockClient
from ollama_tiering.protocol import calls as rpc
from ollama_tiering.protocol.pb import administration_pb2 as adm
from ollama_tiering.store import FsTier, TierKind
from ollama_tiering.store import block_store_pb2 as pb
from ollama_tiering.system.listener import grpc_address

_START_SECONDS: Final = 5.0
_MEMORY_BYTES: Final = 300e6
_FLAT: Final = 1.05
_SAMPLE_SECONDS: Final = 1.0
_CLIENTS: Final = 4
_ENOUGH_BYTES: Final = 1 << 40
_SLACK_BYTES: Final = 32 << 20  # what the clients have in the air


def measure(disk: Path, files: int, soak_minutes: float, say: Callable[[str], None]) -> Section:
    root = Path(tempfile.mkdtemp(dir=disk, prefix="tiering-bench-"))
    try:
        say(f"making {files:,} block files")
        _make_files(root / "local", files)
        say("starting without an index")
        with _sidecar(root, files) as (first, _, _):
            pass
        say("starting with one")
        with _sidecar(root, files) as (seconds, process, socket):
            _look_up(socket, files)
            memory = psutil.Process(process.pid).memory_info().rss
            used_bytes = _local(socket).used_bytes
        samples_bytes: list[int] = []
        if soak_minutes > 0:  # in a full tier: as many blocks at the end as in the beginning
            with _sidecar(root, files, used_bytes + _SLACK_BYTES) as (_, process, socket):
                samples_bytes = _soak(process.pid, socket, files, soak_minutes, say)
    finally:
        shutil.rmtree(root, ignore_errors=True)
    bound = f"{_START_SECONDS:g} s"
    ratios = [
        Ratio("start, no index", f"{first:.2f} s", bound, first / _START_SECONDS),
        Ratio("start", f"{seconds:.2f} s", bound, seconds / _START_SECONDS, 1.0, at_most=True),
        Ratio(
            "memory after look-ups",
            f"{memory / 1e6:.0f} MB",
            "300 MB",
            memory / _MEMORY_BYTES,
            1.0,
            at_most=True,
        ),
    ]
    notes = [f"{files:,} block files of one small layer; the sidecar is a process of its own."]
    if samples_bytes:
        ratios += _flat(samples_bytes)
        notes.append(
            f"Soak: {soak_minutes:g} minutes of {_CLIENTS} clients that put new conversations and "
            "get it or an old one, as fast as they can, in a tier that is full: what comes pushes "
            "out as much. Resident memory once a second. The first quarter is left out."
        )
    else:
        notes.append("No soak: --soak MINUTES.")
    return Section("scale", "Very many blocks", "÷ bound", ratios, notes)


def _flat(samples_bytes: list[int]) -> list[Ratio]:
    quarter = len(samples_bytes) // 4
    early = statistics.median(samples_bytes[quarter : 2 * quarter])
    late = statistics.median(samples_bytes[3 * quarter :])
    most = max(samples_bytes)
    return [
        Ratio(
            "soak, memory, last quarter",
            f"{late / 1e6:.0f} MB",
            f"second quarter, {early / 1e6:.0f} MB",
            late / early,
            _FLAT,
            at_most=True,
        ),
        Ratio(
            "soak, most memory",
            f"{most / 1e6:.0f} MB",
            "300 MB",
            most / _MEMORY_BYTES,
            1.0,
            at_most=True,
        ),
    ]


def _make_files(directory: Path, blocks: int) -> None:
    """Makes the files that a sidecar would have left, but faster."""
    tier = FsTier(TierKind.LOCAL, directory)
    try:
        for number in range(-(-blocks // CHAIN)):
            for block in samples.sequence(NS, chain_tokens(number))[: blocks - number * CHAIN]:
                path = Path(tier.path(NS.digest(), block.key) or "")  # this tier names files
                path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
                path.write_bytes(block.data)
    finally:
        tier.close()


@contextlib.contextmanager
def _sidecar(
    root: Path, files: int, budget_bytes: int = _ENOUGH_BYTES
) -> Iterator[tuple[float, subprocess.Popen[str], str]]:
    """(seconds until it is ready, the process, its socket). All files are known by then."""
    budget = ["--local-gb", str(budget_bytes / 2**30)]
    with sidecar(["--ram-gb", "0", "--local", str(root / "local"), *budget]) as started:
        while not _settled(_local(started[2]), files if budget_bytes == _ENOUGH_BYTES else 0):
            time.sleep(0.1)
        yield started


def _settled(tier: adm.TierStat, blocks: int) -> bool:
    """Whether at least that many are known, and the files are counted; nothing is written before
    that.
    """
    return tier.surveyed and tier.blocks >= blocks


def _local(socket: str) -> adm.TierStat:
    with grpc.insecure_channel(grpc_address(socket)) as channel:
        found: adm.StatResponse = rpc.BlockStoreStub(channel).Stat(pb.StatRequest(), timeout=30)
        return found.tiers[0]


def _look_up(socket: str, files: int) -> None:
    with grpc.insecure_channel(grpc_address(socket)) as channel:
        stub = rpc.BlockStoreStub(channel)
        for keys, tokens in prompts(files, 500):
            stub.Has(has_request(keys, tokens), timeout=30)


def _soak(
    pid: int, socket: str, files: int, minutes: float, say: Callable[[str], None]
) -> list[int]:
    say(f"soak of {minutes:g} minutes")
    over = threading.Event()
    failures: list[str] = []
    clients = [
        threading.Thread(target=_client, args=(socket, files, number, over, failures))
        for number in range(_CLIENTS)
    ]
    for client in clients:
        client.start()
    process = psutil.Process(pid)
    found = []
    try:
        end = time.monotonic() + 60 * minutes
        while time.monotonic() < end and not failures:
            time.sleep(_SAMPLE_SECONDS)
            found.append(process.memory_info().rss)
    finally:
        over.set()
        for client in clients:
            client.join()
    if failures:
        raise RuntimeError(failures[0])
    return found


def _client(
    socket: str, files: int, number: int, over: threading.Event, failures: list[str]
) -> None:
    """Stores a new conversation, then gets that one and an old one, in turns. An old one may have
    been evicted, a new one not.
    """
    rows = np.zeros((BLOCK_TOKENS, 8), np.float16)
    segments = {(0, "k"): rows, (0, "v"): rows}
    turn = 0
    with BlockClient(socket, lookup_seconds=30.0) as client:
        while not over.is_set():
            turn += 1
            tokens = chain_tokens((1 << 32) + (number << 24) + turn)[: BLOCK_TOKENS * 8]
            if client.put(NS, tokens, lambda _index: segments).rows < len(tokens):
                failures.append("a conversation was not stored, though old ones could go for it")
                return
            old = chain_tokens((turn * 7919 + number) % max(1, files // CHAIN))
            with client.get(NS, client.match(NS, tokens if turn % 2 else old)) as blocks:
                if turn % 2 and not blocks:
                    failures.append("blocks that were stored are gone")
                    return
        if client.failures:
            failures.append(f"calls failed: {client.failures}")
