"""Where stock loses: conversations that begin with the same 600 tokens take turns in one slot, and
the model is unloaded in between, as Ollama does. Stock goes on in the rows of the last one, with
what both have in common; after an unload it has nothing.
"""

from __future__ import annotations

import random

import pytest

from tests.engine_llama_server.server import LlamaServer, Starter
from tests.engine_llama_server.test_llama_server import blocks_of, text, wait_stored
from tests.sidecar import SidecarProcess

SYSTEM, OWN = 600, 2400
OPTIONS = ("llama-tiny", "-fa", "on", "-np", "1", "-c", "4096")


def conversations() -> list[list[int]]:
    """A, B, C and D."""
    rng = random.Random(5)
    system = text(rng, SYSTEM)
    return [[*system, *text(rng, OWN, first=first)] for first in (5, 6, 7, 8)]


def cached(server: LlamaServer, *prompts: list[int]) -> list[int]:
    return [server.complete(prompt, 4).cached for prompt in prompts]


def test_a_conversation_that_lost_its_slot_to_others_with_the_same_beginning(
    start: Starter, sidecar: SidecarProcess, capsys: pytest.CaptureFixture[str]
) -> None:
    a, b, c, d = conversations()
    more = [*a, *text(random.Random(6), 30)]
    found = {}
    for way, cache_ram in (("stock", "0"), ("stock, --cache-ram 8192", "8192"), ("tiered", "0")):
        tiered = {"sidecar": sidecar} if way == "tiered" else {}
        env = {"LLAMA_ARG_CACHE_RAM": cache_ram}
        server = start(*OPTIONS, env=env, **tiered)
        resident = cached(server, a, b, c, more)
        if tiered:
            own = (SYSTEM + OWN) // 64 - SYSTEM // 64
            wait_stored(sidecar, server, blocks_of(SYSTEM + OWN) + 2 * own)
        server.kill()
        server = start(*OPTIONS, env=env, **tiered)
        found[way] = resident, cached(server, d, more)
        server.kill()
    with capsys.disabled():
        print("\ncached tokens of A, B, C, and A again; after an unload of new D, and A again:")
        for way, (resident, after) in found.items():
            print(f"  {way:<24} {resident} {after}")
    resident, after = found["tiered"]
    assert min(resident[1:3]) >= 576
    assert resident[3] >= 2900
    assert after[0] >= 576
    assert after[1] >= 2900
    # What it is compared with.
    assert found["stock"][0][3] <= SYSTEM
    assert found["stock, --cache-ram 8192"][1] == [0, SYSTEM]
