"""Restored K/V gives the answer of stock's own in-memory hit, bit for bit.

Every check: the reference server (tiering off) is driven so that the probing request finds its
prefix in memory; the tested server stores the same beginnings, loses its memory, and must answer
the probing request with the same tokens and logprobs, resumed at the same position, every resumed
token restored. Prompts differ from check to check: what one probe leaves in the store helps no
other.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from tests.engine.harness import (
    BLOCK_TOKENS,
    PREDICT,
    Restore,
    Result,
    Server,
    Sidecar,
    assert_same,
    in_memory,
    text,
)
from tests.engine.shifts import waiting_for_logits
from tests.places import short_directory

Event = Callable[["Rig", str], None]

ATTEMPTS = 3


@dataclass(frozen=True)
class Exchange:
    """What a conversation is before the probing request, and that request, given the answers."""

    name: str
    start: Callable[[str], str]
    turns: Sequence[Callable[[str, list[str]], str]]  # (first prompt, answers so far) -> prompt
    options: dict[str, Any] = field(default_factory=dict)  # of the probing request

    def run(self, server: Server, model: str, seed: str) -> tuple[str, list[Result]]:
        """Sends everything before the probe; returns the probing prompt."""
        first = self.start(seed)
        answers = [server.generate(model, first)]
        for turn in self.turns[:-1]:
            answers.append(server.generate(model, turn(first, [a.text for a in answers])))
        return self.turns[-1](first, [a.text for a in answers]), answers


EXCHANGES = (
    Exchange("same prompt", lambda s: text(300, s), [lambda p, a: p]),
    Exchange("same prompt of whole blocks", lambda s: text(5 * BLOCK_TOKENS, s), [lambda p, a: p]),
    Exchange("last 3 tokens differ", lambda s: text(700, s), [lambda p, a: p[:-3] + "\n\n\n"]),
    Exchange("middle differs", lambda s: text(257, s), [lambda p, a: p[:130] + "\n" + p[131:]]),
    Exchange(
        "continued by a turn",
        lambda s: text(180, s),
        [lambda p, a: p + a[0] + text(40, ("turn", p))],
    ),
    Exchange(
        "regenerated answer",
        lambda s: text(200, s),
        [lambda p, a: p + a[0] + text(50, ("turn", p))] * 2,
        {"temperature": 0.9, "seed": 7},
    ),
)


class LookupTooSlow(Exception):
    """On a busy machine the sidecar's answer can miss its deadline: right, but no check."""


def until_heard(check: Callable[[int], None]) -> None:
    for attempt in range(ATTEMPTS):
        with contextlib.suppress(LookupTooSlow):
            check(attempt)
            return
    pytest.fail(f"in {ATTEMPTS} attempts the sidecar's answer was always late")


@dataclass
class Rig:
    """A tested and a reference server that differ in nothing but the tiering."""

    sidecar: Sidecar
    server: Server
    reference: Server

    def displace(self, model: str, seed: object) -> None:
        """Another prompt takes the slot, so that memory holds nothing of what was before."""
        self.server.generate(model, "\n" + text(80, seed))
        self.sidecar.settle(self.server, model)

    def check(
        self, what: object, reference: Result, model: str, prompt: str, **options: Any
    ) -> Restore:
        """The probe's answer is the reference's, and what it did not compute was restored."""
        before, pauses = len(self.server.restores()), self.server.pauses()
        answer = self.server.generate(model, prompt, **options)
        if answer.resumed != reference.resumed and self.server.pauses() > pauses:
            raise LookupTooSlow
        assert_same(answer, reference, what)
        (restore,) = self.server.restores()[before:]
        assert restore.first + restore.tokens == reference.resumed
        assert restore.tokens >= BLOCK_TOKENS
        return restore


@contextlib.contextmanager
def running(binary: Path, models: Path, folder: Path, env: dict[str, Any]) -> Iterator[Rig]:
    with (
        short_directory(in_memory=True) as fast,
        Sidecar(folder / "sidecar", fast) as sidecar,
        Server(binary, folder / "tested", models, socket=sidecar.socket, env=env) as server,
        Server(binary, folder / "reference", models, env=env) as reference,
    ):
        yield Rig(sidecar, server, reference)


def rigs(env: Callable[..., dict[str, Any]]) -> Any:
    """A fixture `rig`: what a test's parameter, a tuple, makes of `env` is both servers' own."""

    @pytest.fixture(scope="module")
    def rig(
        request: pytest.FixtureRequest,
        binary: Path,
        models: Path,
        tmp_path_factory: pytest.TempPathFactory,
    ) -> Iterator[Rig]:
        folder = tmp_path_factory.mktemp("rig")
        with running(binary, models, folder, env(*request.param)) as found:
            yield found

    return rig


def settings(
    flash_attention: int | str, slots: int, attention: str, cache_type: str = "f16"
) -> dict[str, Any]:
    return {
        "OLLAMA_FLASH_ATTENTION": flash_attention,
        "OLLAMA_NUM_PARALLEL": slots,
        "OLLAMA_CPU_ATTENTION": attention,
        "OLLAMA_KV_CACHE_TYPE": cache_type,
        "OLLAMA_MAX_LOADED_MODELS": 2,
    }


rig = rigs(settings)


def come_back(rig: Rig, model: str, event: Callable[[], None]) -> None:
    """All of EXCHANGES, whose beginnings are stored, are as in memory after the event."""
    left = list(EXCHANGES)

    def exchanges(attempt: int) -> None:
        prompts, expected = [], []
        pauses = rig.server.pauses()
        for exchange in left:
            seed = f"{exchange.name} {model} {attempt}"
            prompt, _ = exchange.run(rig.reference, model, seed)
            expected.append(rig.reference.generate(model, prompt, **exchange.options))
            assert exchange.run(rig.server, model, seed)[0] == prompt
            prompts.append(prompt)
        rig.displace(model, attempt)
        if rig.server.pauses() > pauses:  # not all of it was stored then
            raise LookupTooSlow
        event()
        for exchange, prompt, reference in zip(list(left), prompts, expected, strict=True):
            rig.check(exchange.name, reference, model, prompt, **exchange.options)
            left.remove(exchange)

    until_heard(exchanges)


def keep_alive_0(rig: Rig, model: str) -> None:
    rig.server.unload(model)


def restart_of_the_server(rig: Rig, model: str) -> None:
    rig.server.restart()


def kill_of_the_runner(rig: Rig, model: str) -> None:
    rig.server.kill_runner(model)


def restart_of_the_sidecar(rig: Rig, model: str) -> None:
    rig.sidecar.restart()
    rig.displace(model, "the runner has found the sidecar again")


def kill_of_the_sidecar(rig: Rig, model: str) -> None:
    rig.sidecar.kill()
    rig.sidecar.start()
    rig.displace(model, "the runner has found the sidecar again")


EVENTS = (
    keep_alive_0,
    restart_of_the_server,
    kill_of_the_runner,
    restart_of_the_sidecar,
    kill_of_the_sidecar,
)


# flash attention, slots, attention on the CPU
RIGS = [
    (1, 1, "stock"), (0, 1, "stock"), (1, 4, "stock"), (0, 4, "stock"),
    (1, 1, "exact"), (1, 4, "exact"),
]  # fmt: skip
OFTEN = [(RIGS[0], "g2"), (RIGS[1], "g5"), (RIGS[2], "g2"), (RIGS[3], "g5"), (RIGS[5], "g2")]
OFTEN += [(rig, "llama") for rig in (RIGS[0], RIGS[3], RIGS[5])]
# Stock has no flash attention for it, where it is asked for either; test_architectures.py has.
OFTEN += [(RIGS[2], "gemma2")]
SETUPS = [
    pytest.param(
        rig,
        model,
        id=f"fa{rig[0]}-slots{rig[1]}-{rig[2]}-{model}",
        marks=() if (rig, model) in OFTEN else pytest.mark.slow,
    )
    for models in (("g2", "g5", "llama"), ("gemma2",))
    for rig in RIGS
    for model in models
]


def in_turn(rig: Any, number: int) -> str:
    """Which of its models in OFTEN meets the event in a rig."""
    often = [model for other, model in OFTEN if other == rig]
    return often[(number + RIGS.index(rig)) % len(often)] if often else ""


# Every event meets every rig, with one of the models; the rest of the product is slow.
PRODUCT = [
    pytest.param(
        *setup.values,
        event,
        id=f"{setup.id}-{event.__name__}",
        marks=() if setup.values[1] == in_turn(setup.values[0], number) else pytest.mark.slow,
    )
    for setup in SETUPS
    for number, event in enumerate(EVENTS)
]


@pytest.mark.parametrize(("rig", "model", "event"), PRODUCT, indirect=["rig"])
def test_restored_answer_is_the_in_memory_answer(rig: Rig, model: str, event: Event) -> None:
    left = list(EXCHANGES)

    def exchanges(attempt: int) -> None:
        seeds = [f"{exchange.name} {model} {event.__name__} {attempt}" for exchange in left]
        prompts, expected = [], []
        for exchange, seed in zip(left, seeds, strict=True):
            prompt, answers = exchange.run(rig.reference, model, seed)
            expected.append(rig.reference.generate(model, prompt, **exchange.options))
            again, stored = exchange.run(rig.server, model, seed)
            for answer, reference in zip(stored, answers, strict=True):
                assert_same(answer, reference, f"{exchange.name}, before")
            assert again == prompt
            prompts.append(prompt)
        rig.displace(model, event.__name__)
        event(rig, model)
        for exchange, prompt, reference in zip(list(left), prompts, expected, strict=True):
            assert len(reference.tokens) == PREDICT
            with contextlib.suppress(LookupTooSlow):
                rig.check(exchange.name, reference, model, prompt, **exchange.options)
                left.remove(exchange)
        if left:
            raise LookupTooSlow

    until_heard(exchanges)


@pytest.mark.parametrize(("rig", "model"), SETUPS, indirect=["rig"])
def test_what_memory_has_is_kept_and_the_rest_is_restored(
    rig: Rig, model: str, request: pytest.FixtureRequest
) -> None:
    attention = request.node.callspec.params["rig"][2]
    by_rows = attention == "stock" or model in ("llama", "gemma2")

    def keep(attempt: int) -> None:
        for shared in (50, 64):
            prompt = text(400, (model, shared, attempt))
            rig.reference.generate(model, prompt)
            expected = rig.reference.generate(model, prompt)
            rig.server.generate(model, prompt)
            rig.displace(model, (model, shared))
            rig.server.generate(model, prompt[:shared] + "\n" + text(60, "else"))
            restored = rig.check(shared, expected, model, prompt)
            if by_rows:  # those of a block that is not whole are perhaps of another history
                assert restored.first in (0, shared // BLOCK_TOKENS * BLOCK_TOKENS)
            else:
                assert restored.first == shared

    until_heard(keep)


@pytest.mark.parametrize(("rig", "model"), SETUPS, indirect=["rig"])
def test_an_answer_after_a_restored_one_is_the_in_memory_answer(rig: Rig, model: str) -> None:
    """What is stored after a restore, partly from restored rows, is as good as computed."""

    def converse(attempt: int) -> None:
        first = text(210, (model, attempt))
        prompt, expected = first, []
        for _ in range(4):
            expected.append(rig.reference.generate(model, prompt))
            prompt += expected[-1].text + text(45, prompt)
        assert_same(rig.server.generate(model, first), expected[0])
        prompt = first
        for turn, reference in enumerate(expected):
            if turn:
                rig.displace(model, (turn, model))
                rig.server.unload(model)
                rig.check(turn, reference, model, prompt)
            prompt += reference.text + text(45, prompt)

    until_heard(converse)


@pytest.mark.parametrize(("rig", "model"), SETUPS[::2], indirect=["rig"])
def test_a_context_shift_after_a_restore_is_that_of_memory_and_is_never_stored(
    rig: Rig, model: str
) -> None:
    context, keep, predict = 2048, 4, 70

    def shift(attempt: int, memory: Server) -> None:
        prompt = text(context - 40, ("shift", attempt))
        memory.generate(model, prompt, predict=1)
        expected = memory.generate(model, prompt, predict=predict)
        rig.server.generate(model, prompt)
        rig.displace(model, ("shift", attempt))
        rig.server.unload(model)
        rig.check("shift", expected, model, prompt, predict=predict)
        assert rig.server.log_text().count("context limit hit - shifting") > attempt

        # What is in the slot now: K/V that saw tokens which are gone. In memory stock goes on with
        # it; it must not come back from the store.
        rig.sidecar.settle(rig.server, model)
        rig.server.unload(model)
        discarded = (context - keep) // 2
        left = prompt[:keep] + (prompt + expected.text)[keep + discarded : -1]
        rig.reference.unload(model)
        rig.reference.generate(model, prompt, predict=predict)
        assert rig.reference.generate(model, left).resumed > context // 3
        answer = rig.server.generate(model, left)
        assert answer.resumed <= keep
        assert_same(answer, in_memory(rig.reference, model, left, answer.resumed))

    with waiting_for_logits(rig.reference) as memory:
        until_heard(lambda attempt: shift(attempt, memory))
