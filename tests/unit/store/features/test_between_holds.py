"""What another thread does just before a verb takes the lock, or just after, comes to no harm."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import pytest

from measure.store import samples
from ollama_tiering.store.block.key import BlockKey
from ollama_tiering.store.books import model_budget
from ollama_tiering.store.books.terms import Terms
from ollama_tiering.store.errors import PinsFull
from ollama_tiering.store.serving.session import Outcome
from ollama_tiering.store.tiers.contract import TierKind
from ollama_tiering.store.upkeep import making_room, unlinking
from tests.unit.store.ruled import Ruled
from tests.unit.store.support import BLOCK_TOKENS, FILE_BYTES, NAMESPACE, NS, Bench, keys_of


class Overtaken:
    """Stands for the store's lock: somebody else had it just before, once."""

    def __init__(self, bench: Bench, before: Callable[[], object]) -> None:
        self._lock = threading.Lock()
        self._before: Callable[[], object] | None = before
        bench.state.lock = self  # type: ignore[assignment]

    def __enter__(self) -> None:
        before, self._before = self._before, None
        if before is not None:
            before()
        self._lock.acquire()

    def __exit__(self, *_: object) -> None:
        self._lock.release()


def test_a_budget_that_is_lifted_meanwhile_evicts_nothing_for_the_old_one() -> None:
    bench = Ruled(ram=None, local=16)
    blocks = bench.put(range(16))
    level = bench.state.levels[0]
    bench.rule(Terms(budget_bytes=4 * FILE_BYTES))
    Overtaken(bench, lambda: bench.rule(Terms()))
    assert making_room.shrink_models(bench.state, level) is False
    bench.rule(Terms(budget_bytes=5 * FILE_BYTES))
    Overtaken(bench, lambda: bench.rule(Terms()))
    reservation = making_room.reserve(bench.state, level, FILE_BYTES, NAMESPACE)
    assert reservation is not None
    reservation.release()
    assert model_budget.excess_of(bench.state, level, NAMESPACE) == []
    assert bench.in_tier(0) == keys_of(blocks)


def test_a_budget_that_is_lowered_meanwhile_bounds_what_may_be_pinned() -> None:
    bench = Bench(ram=None, local=16)
    blocks = bench.put(range(24))
    level = bench.state.levels[0]

    def lower() -> None:
        level.lru.budget_bytes = 8 * FILE_BYTES

    Overtaken(bench, lower)
    with pytest.raises(PinsFull):
        bench.store.pins.pin(blocks[-1].key)
    assert not bench.state.pins.keeps(blocks[0].key)


def test_pins_are_enforced_by_the_budget_that_holds(monkeypatch: pytest.MonkeyPatch) -> None:
    bench = Bench(ram=None, local=16)
    blocks = bench.put(range(24))
    bench.store.pins.pin(blocks[-1].key)
    Overtaken(bench, lambda: bench.store.set_budget(TierKind.LOCAL, 8 * FILE_BYTES))
    bench.store.pins.enforce()
    assert not bench.state.pins.keeps(blocks[0].key)


def test_a_block_that_one_writer_gives_up_is_the_next_ones_alone(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The first still unlinks what was stored on top of it when the second begins the block."""
    bench = Bench()
    (block,) = samples.sequence(NS, range(BLOCK_TOKENS))
    first, second, third = (
        bench.store.open_session(NAMESPACE, NS.fields(), BLOCK_TOKENS) for _ in range(3)
    )
    assert first.reserve([block.offer])[0].outcome is Outcome.RESERVED
    answers = []

    def unlink(*_: Any) -> list[Any]:
        answers.append(second.reserve([block.offer])[0].outcome)
        return []

    with monkeypatch.context() as patch:
        patch.setattr(unlinking, "unlink", unlink)
        first.close()
    assert answers == [Outcome.RESERVED]
    assert third.reserve([block.offer])[0].outcome is Outcome.PRESENT
    assert bench.state.held(BlockKey(NAMESPACE))  # what comes before it, for the second writer
    second.close()
    assert not bench.state.held(BlockKey(NAMESPACE))
