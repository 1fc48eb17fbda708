"""Connections of engines that say whatever they like: each request is answered or hung up on, the
sidecar goes on, and when they are gone nothing is leased or reserved.
"""

from __future__ import annotations

import contextlib
import random
import socket
from collections.abc import Iterator
from pathlib import Path

import pytest

from ollama_tiering.protocol.engine import messages as m
from ollama_tiering.protocol.engine.messages import Kind
from ollama_tiering.protocol.engine.wire import HEAD, MAX_REPLY_BYTES, frame_head
from ollama_tiering.protocol.plain_text import path_of
from tests.contract.fake_engine import MODELS, FakeEngine, engine_socket, hello, nothing_is_held
from tests.fuzz import engine_messages
from tests.fuzz.campaign import Campaign, count, time_limit
from tests.fuzz.watched import WatchedSidecar

CONNECTIONS = count("engines")
REQUESTS = 6  # of a connection, at most
ANSWERS = (Kind.WELCOME, Kind.MATCHED, Kind.DONE, Kind.PLANNED, Kind.COMMITTED, Kind.FAILED)
BOUND_BYTES = 512 << 20
SECONDS = 30.0


@pytest.fixture(scope="module")
def daemon(tmp_path_factory: pytest.TempPathFactory) -> Iterator[WatchedSidecar]:
    root = tmp_path_factory.mktemp("watched")
    with WatchedSidecar(root, ram_gb=0.03, local_gb=0.05) as running:
        yield running


def answer(engine: socket.socket) -> tuple[int, bytes] | None:
    """None: the sidecar has hung up."""
    received = b""
    wanted = HEAD.size
    while len(received) < wanted:
        part = engine.recv(min(wanted - len(received), 1 << 20))
        if not part:
            assert not received, "hung up in the middle of an answer"
            return None
        received += part
        if len(received) == HEAD.size:
            wanted += frame_head(received, MAX_REPLY_BYTES)[0]
    return frame_head(received[: HEAD.size], MAX_REPLY_BYTES)[1], received[HEAD.size :]


def converse(daemon: WatchedSidecar, rng: random.Random) -> str:
    """How it ended."""
    ids: list[int] = []
    said = engine_messages.plausible_hello(rng).pack()
    with socket.socket(socket.AF_UNIX) as engine:
        engine.settimeout(SECONDS)
        engine.connect(str(engine_socket(daemon.socket)))
        sent = engine_messages.spoiled(rng, Kind.HELLO, said)
        for number in range(REQUESTS):
            whole = len(sent) >= HEAD.size and len(sent) >= HEAD.size + int.from_bytes(
                sent[:4], "little"
            )
            engine.sendall(sent)
            if not whole and rng.random() < 0.5:
                return "left in the middle"
            if not whole:
                engine.shutdown(socket.SHUT_WR)
            got = answer(engine)
            if got is None:
                return "hung up on"
            kind, body = got
            assert kind in ANSWERS
            if kind == Kind.FAILED and m.Failed.unpack(body).code < m.EngineFailure.NO_ROOM:
                assert answer(engine) is None
                return "refused"
            ids += engine_messages.ids_of(kind, body)
            if number and rng.random() < 0.1:
                break
            sent = engine_messages.request(rng, ids)
    return "left"


def still_well(daemon: WatchedSidecar) -> None:
    daemon.wait(nothing_is_held, "leases and reservations are given back", SECONDS)
    # Under a name of its own: what the others stored has the checksums that they made up.
    with FakeEngine(daemon.socket, hello(fields={"rope": "well"})) as engine:
        assert engine.store(engine_messages.STORED)[1] == []
        assert engine.restore(engine_messages.STORED) == len(engine_messages.STORED) - 1
    assert "Traceback" not in daemon.log, daemon.log[-5000:]
    for tier in daemon.stat().tiers:
        held = Path(path_of(tier.directory))
        physical = sum(p.lstat().st_blocks * 512 for p in [held, *held.rglob("*")])
        assert physical <= tier.budget_bytes
    # The files that the engines do have loaded are read, for what is in them, and only read.
    loaded = {(e, str(f)) for e in ("open", "opened") for f in Path(MODELS.name).iterdir()}
    assert set(daemon.outside()) <= loaded
    assert daemon.peak_bytes() < BOUND_BYTES


@pytest.mark.timeout(time_limit(CONNECTIONS * REQUESTS))
def test_no_engine_does_harm(daemon: WatchedSidecar) -> None:
    with FakeEngine(daemon.socket) as engine:
        engine.store(engine_messages.STORED)
    campaign = Campaign("engines", CONNECTIONS)
    for number in campaign:
        with campaign.input(number) as rng:
            ended = "reset"
            with contextlib.suppress(ConnectionResetError, BrokenPipeError):
                ended = converse(daemon, rng)
            campaign.outcomes[ended] += 1
    still_well(daemon)
    campaign.report()
    assert {"left", "refused"} <= set(campaign.outcomes) or CONNECTIONS < 50
