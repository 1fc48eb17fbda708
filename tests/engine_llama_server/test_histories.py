"""Two histories under one text: rows of the same tokens whose last bits differ, for they were
computed alone or in another batch. What is restored is one of them, whole.
"""

from __future__ import annotations

import random
from collections.abc import Callable

import pytest

from tests.engine_llama_server.server import Answer, LlamaServer, Starter
from tests.engine_llama_server.test_llama_server import WAYS, report, text, wait_stored
from tests.engine_llama_server.test_states import settled
from tests.sidecar import SidecarProcess

ONE = (*WAYS["flash attention"], "-c", "4096")
TWO = (*WAYS["two slots"], "-c", "4096")


@pytest.fixture
def rng() -> random.Random:
    return random.Random(29)


def conversation(server: LlamaServer, prompt: list[int], more: list[list[int]]) -> list[int]:
    """Asks, regenerates, and goes on: the regenerated answer stands on a row computed alone. All
    tokens, without the last answer.
    """
    server.complete(prompt, 10)
    said = server.complete(prompt, 10)
    assert said.computed == 1
    tokens = [*prompt, *said.tokens]
    for turn in more:
        tokens += turn
        tokens += server.complete(tokens, 10).tokens
    return tokens


def asked_again(
    start: Starter,
    sidecar: SidecarProcess,
    options: tuple[str, ...],
    talk: Callable[[LlamaServer], list[int]],
) -> tuple[Answer, Answer, int]:
    """Of the same question after the talk: the answer in memory, the one after a restart, and the
    tokens that were restored for it.
    """
    resident = start(*options)
    question = [*talk(resident), 7]
    hit = resident.complete(question)
    resident.kill()
    tiered = start(*options, sidecar=sidecar)
    assert [*talk(tiered), 7] == question
    wait_stored(sidecar, tiered, (len(question) - 1) // 64)
    settled(sidecar, tiered)
    tiered.kill()
    again = start(*options, sidecar=sidecar)
    said = again.complete(question)
    return hit, said, report(sidecar, again, 1).restored_tokens


@pytest.mark.parametrize("first", [300, 310, 314, 319, 320])
def test_a_conversation_that_goes_on_after_a_regenerate_comes_back_whole(
    start: Starter, sidecar: SidecarProcess, rng: random.Random, first: int
) -> None:
    """Wherever in its block the row lies that was computed anew."""
    prompt, more = text(rng, first), [text(rng, 40), text(rng, 90)]
    hit, said, restored = asked_again(
        start, sidecar, ONE, lambda server: conversation(server, prompt, more)
    )
    assert restored >= 0.95 * hit.cached > 300
    assert said == hit


def test_regenerating_ten_times_stores_no_tail_for_each(
    start: Starter, sidecar: SidecarProcess, rng: random.Random
) -> None:
    prompt = text(rng, 314)
    tiered = start(*ONE, sidecar=sidecar)
    for _ in range(3):
        tiered.complete(prompt, 30)
    wait_stored(sidecar, tiered, 6)
    settled(sidecar, tiered)
    before = sum(one.blocks for one in sidecar.stat().namespaces)
    for _ in range(10):
        tiered.complete(prompt, 30)
    settled(sidecar, tiered)
    assert sum(one.blocks for one in sidecar.stat().namespaces) == before


def test_two_slots_that_computed_one_text_otherwise_do_not_mix_their_rows(
    start: Starter, sidecar: SidecarProcess, rng: random.Random
) -> None:
    """One computes it at once, the other one token by token, without look-ups; both go on."""
    prompt = text(rng, 200)
    ends = [text(rng, 90, first=first) for first in (3, 4)]

    def talk(server: LlamaServer) -> list[list[int]]:
        server.complete(prompt, 1, id_slot=0)
        for at in range(20, 200, 20):
            server.complete(prompt[:at], 1, id_slot=1)
        server.complete(prompt, 1, id_slot=1)
        asked = []
        for slot, end in enumerate(ends):
            tokens = [*prompt, *end]
            asked.append([*tokens, *server.complete(tokens, 10, id_slot=slot).tokens, 7])
        return asked

    resident = start(*TWO)
    asked = talk(resident)
    hits = [resident.complete(tokens, id_slot=slot) for slot, tokens in enumerate(asked)]
    resident.kill()
    tiered = start(*TWO, sidecar=sidecar, env={"OLLAMA_KV_TIER_GATE": "recompute"})
    assert talk(tiered) == asked
    settled(sidecar, tiered)
    tiered.kill()
    again = start(*TWO, sidecar=sidecar)
    said = [again.complete(tokens, id_slot=slot) for slot, tokens in enumerate(asked)]
    assert report(sidecar, again, 2).restored_tokens > 500
    assert said == hits
