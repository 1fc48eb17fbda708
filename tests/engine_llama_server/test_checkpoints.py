"""A checkpoint that llama-server leaves in a slot, though it is the prompt's before.

The server drops those that end behind what two prompts share, but for one that ends a token later.
From then on it looks like one of the second prompt's. Stored as such, it would be the state of
tokens that it was not computed from, and every later server would go on from it.
"""

from __future__ import annotations

import random
import struct
from collections.abc import Callable
from typing import NamedTuple

import pytest

from tests.engine_llama_server.server import LlamaServer, Starter, alike
from tests.engine_llama_server.test_llama_server import report, text
from tests.engine_llama_server.test_states import COUNT, cold, header, state_files
from tests.sidecar import SidecarProcess

BEHIND = 4  # tokens of a prompt behind the last checkpoint in it

HEAD = struct.Struct("<8sII")  # of a state: magic, version, after how many tokens
MAGIC = b"KVTCKPT\n"


class Case(NamedTuple):
    options: tuple[str, ...]
    before: list[list[int]]  # prompts
    answer: int  # tokens of the answer to the next one
    last: int  # after how many tokens the state is that is stored last


def lfm2(rng: random.Random) -> Case:
    """The server goes back to the end of what is shared only if there is a checkpoint: the first
    prompt leaves it. Going on from there, the second one leaves the one that is a token later.
    """
    options = ("lfm2-tiny", "-fa", "on", "-np", "1", "-c", "4096", "--checkpoint-min-step", "0")
    shared = text(rng, 295)
    before = [[*shared, 5, *text(rng, BEHIND - 1)], [*shared, 6, *text(rng, BEHIND)]]
    return Case(options, before, answer=40, last=295 + 2 + 40 - 1)


def gemma3(rng: random.Random) -> Case:
    """The server goes on wherever the window is. It has left the place when the answer ends: else
    the window is what is stored, and no state. Here the server looks at one row less than a state
    has, so that the row of the wrong token is computed anew; no other rule says so.
    """
    options = ("gemma3-tiny", "-fa", "on", "-np", "1", "-c", "4096", "-ub", "128")
    return Case(options, [[*text(rng, 125), 6, *text(rng, BEHIND)]], answer=300, last=125)


def states(sidecar: SidecarProcess) -> set[int]:
    """After how many tokens."""
    found = set()
    for path in state_files(sidecar):
        magic, _, n_tokens = HEAD.unpack_from(path.read_bytes(), header(path).payload_offset)
        if magic == MAGIC:  # else a window
            found.add(n_tokens)
    return found


@pytest.mark.parametrize("case", [lfm2, gemma3])
@pytest.mark.parametrize("more", [1, 20])
def test_a_checkpoint_of_the_prompt_before_is_not_stored_as_one_of_this_prompt(
    start: Starter, sidecar: SidecarProcess, case: Callable[[random.Random], Case], more: int
) -> None:
    options, before, length, last_state = case(random.Random(1))
    shared = len(before[-1]) - BEHIND - 1
    prompt = [*before[-1][:shared], 7, 11]  # too short to leave checkpoints of its own behind that

    def turns(server: LlamaServer) -> list[int]:
        for one in before:
            server.complete(one, 4)
        said = server.complete(prompt, length)
        assert said.cached == shared
        return [*(prompt + list(said.tokens))[: shared + more], 9, 10]

    resident = start(*options)
    last = turns(resident)
    wanted = resident.complete(last, COUNT)
    resident.kill()
    tiered = start(*options, sidecar=sidecar)
    assert turns(tiered) == last
    sidecar.wait(lambda _: last_state in states(sidecar), "the last state is stored", 30)
    tiered.kill()
    env = {"OLLAMA_KV_TIER_MIN_TOKENS": "1", "OLLAMA_KV_TIER_GATE": "restore"}
    again = start(*options, sidecar=sidecar, env=env)
    said = again.complete(last, COUNT)
    assert alike(said, cold(start, options, last))
    assert said == wanted
    assert report(sidecar, again, 1).restored_tokens == shared
