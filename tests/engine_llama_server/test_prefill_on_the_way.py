"""A long prompt is stored while it is computed: what a client that goes away, a kill or an end of
the server leaves is found by the next try, with the bits of one history.
"""

from __future__ import annotations

import random
import signal
import time

import pytest

from tests.engine_llama_server.prefill import Prefill
from tests.engine_llama_server.server import Answer, Starter
from tests.engine_llama_server.test_llama_server import blocks_of, report, text, wait_stored
from tests.engine_llama_server.test_states import settled
from tests.sidecar import SidecarProcess

PROMPT = 5380
BATCH = 128
OPTIONS = ("llama-tiny", "-fa", "on", "-np", "1", "-c", "8192", "-b", "128", "-ub", "128")
SOON = {"OLLAMA_KV_TIER_PROGRESS_SECONDS": "0.2"}
NEVER = {"OLLAMA_KV_TIER_PROGRESS_SECONDS": "3600"}


@pytest.fixture
def rng() -> random.Random:
    return random.Random(32)


@pytest.fixture
def prompt(rng: random.Random) -> list[int]:
    return text(rng, PROMPT, first=2)


def tail(rng: random.Random, other: int) -> list[int]:
    """Another question, which differs from the prompt in its first token."""
    return text(rng, 30, first=1 + other % 80)


def resident(start: Starter, prompt: list[int], rows: int, question: list[int]) -> Answer:
    """What a server answers to it that computed the prompt in the same batches and goes on behind
    so many of its rows.
    """
    server = start(*OPTIONS)
    server.complete(prompt[: -(-rows // BATCH) * BATCH], 1)
    said = server.complete(question)
    server.kill()
    return said


def found_again(
    start: Starter,
    sidecar: SidecarProcess,
    rng: random.Random,
    prompt: list[int],
    least: float,
    most: int,
) -> None:
    """After a restart the retry goes on behind so many rows, and all bits are those of the one
    history.
    """
    retry = start(*OPTIONS, sidecar=sidecar)
    rows = retry.complete(prompt, 1).cached
    assert least <= rows <= most
    assert report(sidecar, retry, 1).restored_tokens == rows > 0
    retry.kill()
    question = [*prompt[:rows], *tail(rng, prompt[rows])]
    again = start(*OPTIONS, sidecar=sidecar)
    said = again.complete(question)
    assert said.cached == rows
    assert said == resident(start, prompt, rows, question)


@pytest.mark.parametrize("part", [0.25, 0.5, 0.75, 0.95])
def test_a_cancelled_prompt_is_stored_at_once(
    start: Starter, sidecar: SidecarProcess, rng: random.Random, prompt: list[int], part: float
) -> None:
    """All of it, also without parts on the way."""
    tiered = start(*OPTIONS, sidecar=sidecar, env=NEVER if part == 0.5 else SOON)
    with Prefill(tiered, prompt) as prefill:
        prefill.reach(part)
        computed = prefill.leave()
    wait_stored(sidecar, tiered, blocks_of(computed))
    tiered.kill()
    found_again(start, sidecar, rng, prompt, computed, computed)


@pytest.mark.parametrize("tiered", [False, True])
def test_the_retry_of_a_cancelled_prompt_goes_on_in_the_slot(
    start: Starter, sidecar: SidecarProcess, prompt: list[int], tiered: bool
) -> None:
    server = start(*OPTIONS, **({"sidecar": sidecar, "env": SOON} if tiered else {}))
    with Prefill(server, prompt) as prefill:
        prefill.reach(0.5)
        computed = prefill.leave()
    assert server.complete(prompt, 1).cached == computed > PROMPT // 2


def test_of_a_prompt_that_is_killed_nine_tenths_are_found(
    start: Starter, sidecar: SidecarProcess, rng: random.Random, prompt: list[int]
) -> None:
    tiered = start(*OPTIONS, sidecar=sidecar, env=SOON)
    with Prefill(tiered, prompt) as prefill:
        wait_stored(sidecar, tiered, blocks_of(prefill.reach(0.95) * 9 // 10))
        computed = prefill.kill()
    found_again(start, sidecar, rng, prompt, 0.9 * computed, computed)


def test_a_server_that_is_to_end_stores_what_it_has_computed(
    start: Starter, sidecar: SidecarProcess, rng: random.Random, prompt: list[int]
) -> None:
    """Stock waits for its connections: the client stays, and the server is killed in the end."""
    tiered = start(*OPTIONS, sidecar=sidecar, env=NEVER)
    with Prefill(tiered, prompt) as prefill:
        prefill.reach(0.5)
        assert not sum(one.blocks for one in sidecar.stat().namespaces)
        prefill.terminate()
        computed = prefill.kill()
    found_again(start, sidecar, rng, prompt, computed, computed)


def test_a_server_that_is_to_end_waits_for_no_sidecar_for_long(
    start: Starter, sidecar: SidecarProcess, prompt: list[int]
) -> None:
    tiered = start(*OPTIONS, sidecar=sidecar, env=NEVER)
    with Prefill(tiered, prompt) as prefill:
        prefill.reach(0.2)
        sidecar.send_signal(signal.SIGSTOP)
        try:
            begin = time.monotonic()
            prefill.terminate()
            assert time.monotonic() - begin < 30
        finally:
            sidecar.send_signal(signal.SIGCONT)


def test_parts_and_the_whole_are_stored_once(
    start: Starter, sidecar: SidecarProcess, prompt: list[int]
) -> None:
    """Also an answer that is stored while it grows, and the same prompt once more."""
    tiered = start(*OPTIONS, sidecar=sidecar, env=SOON)
    with Prefill(tiered, prompt) as prefill:
        wait_stored(sidecar, tiered, blocks_of(prefill.reach(0.5) // 2))
    tiered.complete(prompt, 200)
    wait_stored(sidecar, tiered, blocks_of(PROMPT + 199))
    settled(sidecar, tiered)
    assert sum(one.blocks for one in sidecar.stat().namespaces) == blocks_of(PROMPT + 199)
