"""A warmed prompt is computed once, and waited for until it is stored."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from ollama_tiering.errors import ServiceError
from ollama_tiering.launch.ollama import Api
from ollama_tiering.store.block.key import BlockKey, as_namespace
from ollama_tiering.store.values import ChainLine, Listing, Selection, Totals
from ollama_tiering.warm.compute import Warmed, warm
from ollama_tiering.warm.prompt import of_parts
from tests.unit.warm.conftest import FakeServer

PROMPT = of_parts("qwen3", system="You are")


def line(tokens: int, last_use: float = 100.0, key: bytes = b"k") -> ChainLine:
    return ChainLine(
        key=BlockKey(key * 32),
        namespace=as_namespace(bytes(32)),
        tokens=tokens,
        blocks=1,
        file_bytes=1,
        own_blocks=1,
        own_bytes=1,
        tiers=(),
        created=last_use,
        last_use=last_use,
        hits=0,
        pinned=False,
        leased=False,
        complete=True,
    )


class FakeStore:
    """Lists something else each time it is asked; the last of it for ever."""

    def __init__(self, *listings: list[ChainLine]) -> None:
        self.left = list(listings)
        self.asked: list[Selection] = []

    def listing(self, selection: Selection) -> Listing:
        self.asked.append(selection)
        chains = self.left.pop(0) if len(self.left) > 1 else self.left[0]
        return Listing(chains, [], {}, Totals(), Totals(), 4)


class Clock:
    def __init__(self) -> None:
        self.now = 99.5

    def __call__(self) -> float:
        return self.now

    def sleep(self, seconds: float) -> None:
        self.now += seconds


def warmed(
    server: FakeServer, store: FakeStore, clock: Callable[[], float] | None = None
) -> Warmed:
    ticking = clock or Clock()
    sleep = getattr(ticking, "sleep", lambda _: None)
    return warm(Api(server.address), store, PROMPT, ("sha256-1",), clock=ticking, sleep=sleep)


def test_it_is_computed_once_and_waited_for(server: FakeServer) -> None:
    store = FakeStore([], [line(64)], [line(64), line(128, key=b"w")])
    done = warmed(server, store)
    assert [path for path, _ in server.asked] == ["/api/chat"]
    assert (done.prompt_tokens, done.stored_tokens, done.whole) == (130, 128, True)
    assert done.chain is not None
    assert done.chain.key == b"w" * 32
    assert store.asked == [Selection(model="qwen3", models=("sha256-1",))] * 3
    assert done.sentence.startswith("128 of 130 tokens are stored; the answer took ")
    assert "2.5 s of them to load the model" in done.sentence


def test_what_was_used_before_is_not_taken_for_it(server: FakeServer) -> None:
    clock = Clock()
    done = warmed(server, FakeStore([line(900, last_use=98.0)]), clock)
    assert (done.chain, done.stored_tokens) == (None, 0)
    assert clock.now > 99.5 + 10, "it was not waited for"


def test_of_longer_ones_the_shortest_is_its_own(server: FakeServer) -> None:
    store = FakeStore([line(131, key=b"w"), line(5000, last_use=200.0, key=b"o")])
    done = warmed(server, store)
    assert done.chain is not None
    assert (done.chain.key, done.stored_tokens) == (b"w" * 32, 130)


def test_a_part_of_it_is_said(server: FakeServer) -> None:
    done = warmed(server, FakeStore([line(64)]))
    assert (done.whole, done.stored_tokens) == (False, 64)


def test_a_server_that_cannot_answer_is_said(server: FakeServer) -> None:
    server.status, server.answer = 404, {"error": "model 'qwen3' not found"}
    with pytest.raises(ServiceError, match="model 'qwen3' not found"):
        warmed(server, FakeStore([]))
