"""Long plans of some engines and look-ups of others: counted, not timed."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest

from ollama_tiering.protocol.engine import messages as m
from ollama_tiering.protocol.engine.messages import Kind
from ollama_tiering.sidecar.content.contents import Contents
from ollama_tiering.sidecar.engine import turns
from ollama_tiering.sidecar.engine.connection import Connection
from ollama_tiering.sidecar.engine.identity import BLOCK_TOKENS, identity_of
from ollama_tiering.sidecar.engine.lookups import EngineLookUps
from ollama_tiering.sidecar.engine.turns import Turns
from ollama_tiering.sidecar.engine.writes import Writes
from ollama_tiering.sidecar.policy import chains
from ollama_tiering.sidecar.policy.chains import PIECE_KEYS
from ollama_tiering.sidecar.rechecks import Rechecks
from ollama_tiering.store import BlockKey, BlockOffer, Outcome
from ollama_tiering.store.serving.session import Reserved
from tests.contract.fake_engine import hello

SECONDS = 60.0
MILLION = 1_000_000


@pytest.fixture(autouse=True)
def patient(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(turns, "_PATIENCE_SECONDS", SECONDS)


def test_while_a_look_up_is_answered_at_most_the_piece_that_has_begun_is_done() -> None:
    shared = Turns()
    in_third, answering = threading.Event(), threading.Event()
    done: list[int] = []

    def items() -> Iterator[int]:
        for number in range(10):
            if number == 3:
                in_third.set()
                assert answering.wait(SECONDS)
            yield number

    def work() -> None:
        for one in shared.taken(items(), 1):
            done.append(one)

    thread = threading.Thread(target=work)
    thread.start()
    assert in_third.wait(SECONDS)
    with shared.look_up():
        answering.set()
        thread.join(0.3)
        assert thread.is_alive()
        assert len(done) <= 4
    thread.join(SECONDS)
    assert done == list(range(10))


def test_two_engines_do_one_piece_at_a_time() -> None:
    shared = Turns()
    inside = most = 0

    def work() -> None:
        nonlocal inside, most
        for _ in range(200):
            with shared.piece():
                inside += 1
                most = max(most, inside)
                threading.Event().wait(0.0001)
                inside -= 1

    threads = [threading.Thread(target=work) for _ in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(SECONDS)
    assert most == 1


def test_look_ups_without_end_do_not_keep_a_plan_from_going_on(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(turns, "_PATIENCE_SECONDS", 0.001)
    shared = Turns()
    with shared.look_up():
        assert list(shared.taken(range(5), 2)) == list(range(5))


class Session:
    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def reserve(self, offers: Sequence[BlockOffer]) -> list[Reserved]:
        path = self.folder / "one"
        return [Reserved(Outcome.RESERVED, number, path) for number, _ in enumerate(offers, 1)]


class GivingTurns(Turns):
    """Between two pieces, somebody else's look-up is answered from its beginning to its end."""

    def __init__(self) -> None:
        super().__init__()
        self.pieces = 0
        self.answer = lambda: None

    @contextlib.contextmanager
    def piece(self) -> Iterator[None]:
        thread = threading.Thread(target=self._answer)
        thread.start()
        thread.join(SECONDS)
        assert not thread.is_alive()  # nothing is held between two pieces
        self.pieces += 1
        with super().piece():
            yield

    def _answer(self) -> None:
        with self.look_up():
            self.answer()


def test_between_two_pieces_of_a_plan_for_a_million_tokens_a_look_up_has_its_turn(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    said = hello()
    identity, given = identity_of(said), GivingTurns()
    hashed: list[int] = []  # blocks whose keys were computed in each piece
    in_pieces = chains.Chains.in_pieces

    def counted(*given: Any) -> Iterator[list[BlockKey]]:
        for piece in in_pieces(*given):
            hashed.append(len(piece))
            yield piece

    monkeypatch.setattr(chains.Chains, "in_pieces", counted)
    store = SimpleNamespace(
        match_in_pieces=lambda *_: iter([[]]),
        find_history=lambda *_: ([], lambda: None),
        reserve_seconds=60.0,
        open_session=lambda *_: Session(tmp_path),
    )
    heads, runner = cast(Any, None), cast(Any, None)

    def look_ups() -> EngineLookUps:
        return EngineLookUps(cast(Any, store), heads, said, identity, runner, 64)

    answered: list[int] = []
    others, prompt = look_ups(), bytes(4 * 8192)

    def answer() -> None:
        answered.append(others.match(m.EngineMatch(prompt)).rows)

    given.answer = answer
    writes = Writes(cast(Any, store), heads, identity, runner, given)
    fingerprints = (bytes(8),) * (MILLION // BLOCK_TOKENS)
    planned = writes.plan(m.Plan(bytes(4 * MILLION), most_files=2, fingerprints=fingerprints))
    assert len(planned.files) == 2
    blocks = MILLION // BLOCK_TOKENS
    assert sum(hashed) == blocks
    assert max(hashed) <= PIECE_KEYS
    assert given.pieces >= blocks / PIECE_KEYS
    assert len(answered) == given.pieces


def test_a_match_is_answered_as_a_look_up_and_nothing_else_is() -> None:
    shared, seen = Turns(), []

    def find(*_: object) -> tuple[list[object], Callable[[], None]]:
        seen.append(shared._look_ups)
        return [], lambda: None

    store = SimpleNamespace(learn_model=lambda *_: None, reserve_seconds=60.0, find_history=find)
    said, contents = hello(), Contents()
    assert all(one.digest for one in contents.wait(said.files, 30.0))
    engines = SimpleNamespace(
        measured=contextlib.nullcontext,
        store=store,
        accounts=SimpleNamespace(account=lambda *_: SimpleNamespace()),
        heads=None,
        contents=contents,
        turns=shared,
        adoptions=SimpleNamespace(of=lambda _, identity: identity),
        rechecks=Rechecks(),
        min_tokens=64,
        lease_seconds=60.0,
    )
    served = Connection(cast(Any, None), 1, cast(Any, engines))
    served._answer(Kind.HELLO, said.pack())
    served._answer(Kind.MATCH, m.EngineMatch(bytes(4 * 200)).pack())
    served._answer(Kind.RELEASE, m.EngineLease(7).pack())
    contents.close()
    assert seen == [1]
    assert shared._look_ups == 0
