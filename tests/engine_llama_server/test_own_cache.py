"""llama-server's own cache of prompts, where nobody says how large it is: off while the sidecar
tiers the model, as in stock wherever it does not.
"""

from __future__ import annotations

import os
import random
import signal
from pathlib import Path

import pytest

from ollama_tiering.client.block_client import BlockClient
from ollama_tiering.protocol.loaded_file import LoadedFile
from tests.engine_llama_server.server import LlamaServer, Starter
from tests.engine_llama_server.test_llama_server import blocks_of, report, text, wait_stored
from tests.sidecar import SidecarProcess

PROMPT = 300
UNSAID = {"LLAMA_ARG_CACHE_RAM": None}
ONE_SLOT = ("llama-tiny", "-fa", "on", "-np", "1", "-c", "2048")
OFF = "own cache of prompts is off"


@pytest.fixture
def conversations() -> list[list[int]]:
    rng = random.Random(12)
    return [text(rng, PROMPT, first=first) for first in (5, 6)]


def cached_of_the_first(server: LlamaServer, conversations: list[list[int]]) -> int:
    """After the other one had the slot."""
    for conversation in conversations:
        server.complete(conversation)
    return server.complete([*conversations[0], 7]).cached


def test_a_model_that_is_stored_does_without(
    start: Starter, sidecar: SidecarProcess, conversations: list[list[int]]
) -> None:
    tiered = start(*ONE_SLOT, sidecar=sidecar, env=UNSAID)
    for conversation in conversations:
        tiered.complete(conversation)
    wait_stored(sidecar, tiered, len(conversations) * blocks_of(PROMPT))
    assert tiered.complete([*conversations[0], 7]).cached == PROMPT
    told = report(sidecar, tiered, 3)
    assert told.restored_tokens == PROMPT  # else it would have been in memory
    assert tiered.log.read_text().count(OFF) == 1


def test_several_slots_do_without(
    start: Starter, sidecar: SidecarProcess, conversations: list[list[int]]
) -> None:
    """The server puts idle slots into it whenever another one gets a request."""
    options = ("llama-tiny", "-fa", "on", "-np", "2", "--no-kv-unified", "-c", "2048")
    tiered = start(*options, sidecar=sidecar, env=UNSAID)
    for conversation in [*conversations, *conversations]:
        tiered.complete(conversation)
    wait_stored(sidecar, tiered, len(conversations) * blocks_of(PROMPT))
    assert OFF in tiered.log.read_text()


def test_a_model_that_is_refused_keeps_it(
    start: Starter, sidecar: SidecarProcess, conversations: list[list[int]]
) -> None:
    options = ("gemma3-tiny", "--swa-full", "-fa", "on", "-np", "1", "-c", "2048")
    refused = start(*options, sidecar=sidecar, env=UNSAID)
    assert cached_of_the_first(refused, conversations) == PROMPT
    assert OFF not in refused.log.read_text()


def test_while_the_model_is_checked_it_is_kept(
    start: Starter, sidecar: SidecarProcess, conversations: list[list[int]], tmp_path: Path
) -> None:
    """Two endless files keep the sidecar from reading the model's: it stores nothing meanwhile."""
    endless = [tmp_path / "one", tmp_path / "two"]
    for path in endless:
        path.touch()
        os.truncate(path, 1 << 40)
    with BlockClient(sidecar.socket) as client:
        assert client.check_files([LoadedFile.of(path) for path in endless]) == ()
    tiered = start(*ONE_SLOT, sidecar=sidecar, env=UNSAID)
    assert cached_of_the_first(tiered, conversations) == PROMPT
    assert OFF not in tiered.log.read_text()
    for path in endless:
        os.truncate(path, 0)
    wait_stored(sidecar, tiered, len(conversations) * blocks_of(PROMPT))
    tiered.complete(conversations[1])
    assert OFF in tiered.log.read_text()


def test_without_a_sidecar_that_answers_it_is_kept(
    start: Starter, sidecar: SidecarProcess, conversations: list[list[int]]
) -> None:
    sidecar.stop()
    alone = start(*ONE_SLOT, sidecar=sidecar, env=UNSAID)
    assert cached_of_the_first(alone, conversations) == PROMPT
    assert OFF not in alone.log.read_text()


def test_when_the_sidecar_is_gone_it_is_back(
    start: Starter, sidecar: SidecarProcess, conversations: list[list[int]]
) -> None:
    tiered = start(*ONE_SLOT, sidecar=sidecar, env=UNSAID)
    tiered.complete(conversations[0])
    report(sidecar, tiered, 1)
    tiered.complete(conversations[1])
    assert OFF in tiered.log.read_text()
    sidecar.send_signal(signal.SIGKILL)
    tiered.complete(conversations[1][:40])  # it finds out
    assert cached_of_the_first(tiered, conversations) == PROMPT


@pytest.mark.parametrize(
    ("options", "env"),
    [(("--cache-ram", "8192"), UNSAID), ((), {"LLAMA_ARG_CACHE_RAM": "8192"})],
    ids=("option", "variable"),
)
def test_whoever_says_how_large_it_is_has_it(
    start: Starter,
    sidecar: SidecarProcess,
    conversations: list[list[int]],
    options: tuple[str, ...],
    env: dict[str, str | None],
) -> None:
    """Also if that is what it is anyway."""
    tiered = start(*ONE_SLOT, *options, sidecar=sidecar, env=env)
    tiered.complete(conversations[0])
    report(sidecar, tiered, 1)
    assert cached_of_the_first(tiered, conversations) == PROMPT
    assert report(sidecar, tiered, 4).restored_tokens == 0
    assert OFF not in tiered.log.read_text()
