"""What the steps that ask Ollama call a success, with answers made up."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from ollama_tiering.engines.context_demo import ContextRun
from ollama_tiering.launch.ollama import Generated
from ollama_tiering.launch.server_log import LoadPlan
from scripts.gpuday import asking
from scripts.gpuday.steps import DONE, FAILED, Day, Outcome

ALL, DIVIDED = LoadPlan(9, 9, kv={"CUDA0": 1 << 20}), LoadPlan(4, 9)


def answer(rate: float = 10.0, logprob: float = -0.5) -> Generated:
    return Generated(["a"], [[("a", logprob)]], 0.1, 0.2, 700, rate)


REFERENCE = asking.digest(ContextRun("stock", 0, ALL, answer()))
DAY = Day(Path("out"), Path("work"), Path("ollama"))
DAY.outcomes = {
    "rates": Outcome(DONE, figures={"pinned_bytes_per_s": None}),
    "stock": Outcome(DONE, figures={"digest": REFERENCE}),
    "sequential": Outcome(DONE, figures={"0": 5.0}),
}


class FakeAsker(asking.Asker):
    """Answers by label; what no label names is answered as stock's."""

    def __init__(self) -> None:
        super().__init__(DAY)
        self.by_label: dict[str, tuple[LoadPlan, Generated]] = {}
        self.asked: dict[str, tuple[dict[str, str], int]] = {}

    def free_bytes(self) -> int:
        return 8 << 30

    def ask(self, label: str, env: dict[str, str], num_ctx: int = 0) -> ContextRun:
        self.asked[label] = env, num_ctx
        return ContextRun(label, num_ctx, *self.by_label.get(label, (ALL, answer())))


@pytest.fixture
def asker(monkeypatch: pytest.MonkeyPatch) -> FakeAsker:
    fake = FakeAsker()
    monkeypatch.setattr(asking, "Asker", lambda _: fake)
    return fake


def test_one_bit_makes_another_digest_and_no_answer_is_none() -> None:
    assert asking.digest(ContextRun("x", 0, ALL, answer(logprob=-0.5000000001))) != REFERENCE
    run = ContextRun("x", 0, ALL, Generated())
    assert asking.digest(run) == "no answer"
    assert asking.judged(Day(Path("out"), Path("work")), [run]).status == FAILED


@pytest.mark.parametrize(
    ("step", "prefetch", "labels"),
    [
        (asking.sequential, "0", [f"in turn, {n} of 8 hot" for n in (8, 0, 4)]),
        (asking.prefetch, None, [f"copied ahead, {n} of 8 hot" for n in (8, 0, 4)]),
    ],
)
def test_hot_none_and_half_are_asked_and_each_must_be_stocks(
    asker: FakeAsker, step: Callable[[Day], Outcome], prefetch: str | None, labels: list[str]
) -> None:
    assert step(DAY).status == DONE
    assert list(asker.asked)[:3] == labels
    for label in labels:
        env, _ = asker.asked[label]
        assert env["OLLAMA_PAGED_HOT_LAYERS"] == label.split()[-4]
        assert env.get("OLLAMA_PAGED_PREFETCH") == prefetch
        assert env["OLLAMA_PAGED_MIRROR"] == "0"
    asker.by_label[labels[1]] = ALL, answer(logprob=-0.6)
    outcome = step(DAY)
    assert outcome.status == FAILED
    assert outcome.why == f"another answer than stock's: {labels[1]}"


def test_mirrors_are_asked_beside_copies_ahead_and_must_be_stocks(asker: FakeAsker) -> None:
    outcome = asking.prefetch(DAY)
    assert "- Copied ahead ÷ in turn, tokens/s, 0 hot: 2.000." in outcome.lines
    assert outcome.bounds == {}  # the pinned copy was not measured
    mirrored = "mirrors, 0 of 8 hot"
    assert "OLLAMA_PAGED_MIRROR" not in asker.asked[mirrored][0]
    asker.by_label[mirrored] = ALL, answer(logprob=-0.6)
    assert asking.prefetch(DAY).why == f"another answer than stock's: {mirrored}"


def test_stock_without_all_layers_is_no_reference(asker: FakeAsker) -> None:
    assert asking.stock(DAY).figures["digest"] == REFERENCE
    asker.by_label["stock"] = DIVIDED, answer()
    assert asking.stock(DAY).status == FAILED


def test_rates_of_the_bus_are_judged_only_with_all_their_parts() -> None:
    sizes = asking.sizes_of(DAY)
    pinned = 10.0 * (700 + 8) * sizes.shape.kv_bytes_per_token  # a token's copies take 0.1 s
    found = asking.copy_bounds(sizes, 8.0, 5.0, 4.0, pinned)
    assert found == {"staging": pytest.approx(0.8), "ahead": pytest.approx((0.2 - 0.125) / 0.1)}
    found = asking.copy_bounds(sizes, 8.0, 5.0, 20.0, pinned)  # a token is computed in 0.05 s
    assert found["ahead"] == pytest.approx((0.2 - 0.125) / 0.05)
    for in_turn, hot in ((None, 4.0), (5.0, 0.0)):
        assert asking.copy_bounds(sizes, 8.0, in_turn, hot, pinned)["ahead"] is None


def test_a_planner_that_loses_layers_is_a_failure_and_so_is_nothing_to_plan(
    asker: FakeAsker,
) -> None:
    assert asking.planner(DAY).status == FAILED
    asker.by_label["stock's plan"] = DIVIDED, answer(5.0, logprob=-0.6)  # which may be
    outcome = asking.planner(DAY)
    assert (outcome.status, outcome.figures["paged_to_divided"]) == (DONE, 2.0)
    for env, num_ctx in asker.asked.values():
        room = (8 << 30) - (457 << 20) - asker.sizes.room_bytes
        assert (env["OLLAMA_GPU_OVERHEAD"], num_ctx) == (str(room), 32768)
    asker.by_label["paged"] = DIVIDED, answer()
    assert "paged 4, of 9" in asking.planner(DAY).why


def test_all_hot_is_compared_with_stock(asker: FakeAsker) -> None:
    asker.by_label["all hot"] = ALL, answer(9.9)
    outcome = asking.graphs(DAY)
    assert outcome.bounds == {"all hot": pytest.approx(0.99)}
    assert len([line for line in outcome.lines if REFERENCE in line]) == 8
