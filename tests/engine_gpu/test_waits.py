"""Rows are written only when the device has computed what was given to it before.

A client leaves while a part of its prompt is computed, and the next prompt gets the same cells. No
CPU shows that. While rows were written into a device's memory at once, lavapipe gave wrong answers
without the wait, in llama-server; since they come by the device's queue it gives none, for it has
one queue for all. So nothing here fails without the wait.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import pytest

from tests.engine.harness import Sidecar
from tests.engine.test_restore import until_heard
from tests.engine_gpu.backends import Backend
from tests.engine_gpu.engines import CHARACTERS, End, Engine, Said
from tests.engine_gpu.test_restore import CPP, GO, OFF_CPP, ON, restored_by, text

Begin = Callable[..., Engine]

SMALL = {"num_batch": 128}
SMALL_CPP = {"-b": "128", "-ub": "128"}
APART = "llama-server, V transposed"
WAYS: dict[str, tuple[str, str, dict[str, Any]]] = {
    "Go engine": (GO, "qwen3", SMALL),
    "llama.cpp engine": (GO, "llama", SMALL),
    "llama-server": (CPP, "llama", ON | SMALL_CPP),
    APART: (CPP, "llama", ON | OFF_CPP | SMALL_CPP),
}
# What nobody wants is not stored, either: to read rows would wait for the device by itself.
READ_ONLY = {"OLLAMA_KV_TIER_SNAPSHOT": "0"}
STORED = 400  # tokens: its rows belong into the cells of nearly all of a prompt that is left
LEFT, RIGHT, ROUNDS = 500, 4, 6  # tokens of the prompts that are left; attempts
OTHER = "9" + text(29, "other")  # stored behind it: both compute the same batches
TAILS = [CHARACTERS[number] + text(29, ("tail", number)) for number in range(RIGHT)]


def wanted(begin: Begin, way: tuple[str, str, Any], prompt: str, count: int) -> list[Said]:
    """Stock's answers when the prompt is in memory."""
    resident = begin(*way)
    resident.ask(prompt + OTHER)
    answers = [resident.ask(prompt + tail) for tail in TAILS[:count]]
    assert [answer.resumed for answer in answers] == [STORED] * count
    resident.close()
    return answers


def after_one_that_left(engine: Engine, prompt: str, number: int, within: float) -> Said:
    """An answer right after a client has left, with the prompt restored. It left while its own was
    computed, which takes so many seconds.
    """
    other = next(one for one in CHARACTERS if one != prompt[0])  # no row of it is the prompt's, too
    engine.leave(other + text(LEFT - 1, ("left", number)), random.uniform(0.0, within))
    said = engine.ask(prompt + TAILS[number])
    assert restored_by(engine) == STORED, number
    return said


@pytest.mark.parametrize("way", WAYS)
def test_rows_are_not_restored_below_what_a_device_still_computes(
    begin: Begin, sidecar: Sidecar, backend: Backend, way: str
) -> None:
    kind, model, how = WAYS[way]
    within = backend.prompt_seconds

    def check(attempt: int) -> None:
        prompt = text(STORED, (way, attempt))
        expected = wanted(begin, WAYS[way], prompt, RIGHT)
        tiered = begin(*WAYS[way], sidecar)
        tiered.ask(prompt + OTHER)
        tiered.lose(End.UNLOAD)
        tiered.close()
        tiered = begin(kind, model, how | READ_ONLY, sidecar)
        for number in range(RIGHT):
            said = after_one_that_left(tiered, prompt, number, within)
            assert said == expected[number], number
        assert tiered.on_device()

    until_heard(check)


@pytest.mark.parametrize("way", ["Go engine", "llama.cpp engine"])
def test_prompts_that_take_turns_get_their_answers_from_memory(
    begin: Begin, sidecar: Sidecar, way: str
) -> None:
    """When an answer ends, the batch behind it is built, and the device may still compute it when
    the next prompt's rows come into its cell.
    """

    def check(attempt: int) -> None:
        prompts = [text(STORED + 50 * number, (way, number, attempt)) for number in range(2)]
        resident, hits = begin(*WAYS[way]), []
        for prompt in prompts:
            resident.ask(prompt)
            hits.append(resident.ask(prompt))
        assert [hit.resumed for hit in hits] == [len(prompt) - 1 for prompt in prompts]
        resident.close()
        tiered = begin(*WAYS[way], sidecar)
        for prompt in prompts:
            tiered.ask(prompt)
        tiered.settle()  # a fast card answers sooner than rows are stored
        for turn in range(2 * ROUNDS):
            answer = tiered.ask(prompts[turn % 2])
            assert restored_by(tiered) > 0, turn
            assert answer == hits[turn % 2], turn

    until_heard(check)
