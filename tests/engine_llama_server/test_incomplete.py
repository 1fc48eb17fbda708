"""A model of which llama.cpp keeps more than the rows that are known: found out after its first
answer. Nothing of it is stored, and it is served as in stock, with the server's own cache of
prompts.
"""

from __future__ import annotations

import random
import re
import shutil
import subprocess
import time
from collections.abc import Mapping
from pathlib import Path

import pytest

from ollama_tiering.store.tiers.names import BLOCK_SUFFIX
from tests.engine_llama_server.server import LlamaServer, Starter
from tests.engine_llama_server.test_llama_server import text
from tests.engine_llama_server.test_own_cache import ONE_SLOT, PROMPT, UNSAID
from tests.integration.engine_program import SOURCE, WARNINGS
from tests.sidecar import SidecarProcess

REFUSED = re.compile(
    r"kv tiering is off: llama\.cpp keeps (\d+) bytes of a sequence, of which (\d+) are known here"
)
MORE = 12345  # of kvt_more_bytes.cpp
SECONDS = 20.0


@pytest.fixture(scope="module")
def incomplete(patched: Path, tmp_path_factory: pytest.TempPathFactory) -> Mapping[str, str | None]:
    """Variables of a server whose cache keeps more than its rows."""
    compiler = shutil.which("g++") or shutil.which("c++")
    if compiler is None:
        pytest.skip("no C++ compiler")
    built = tmp_path_factory.mktemp("kvt") / "kvt_more_bytes.so"
    source = SOURCE / "tests" / "kvt_more_bytes.cpp"
    options = ["-std=c++17", *WARNINGS, "-shared", "-fPIC"]
    subprocess.run([compiler, *options, source, "-o", built], check=True, timeout=600)
    return {**UNSAID, "LD_PRELOAD": str(built)}


@pytest.fixture
def conversations() -> list[list[int]]:
    rng = random.Random(13)
    return [text(rng, PROMPT, first=first) for first in (5, 6)]


def wait_refused(server: LlamaServer) -> None:
    end = time.monotonic() + SECONDS
    while not REFUSED.search(said := server.log.read_text()):
        assert time.monotonic() < end, said[-3000:]
        time.sleep(0.05)


def test_the_refusal_is_said_once_with_its_reason(
    start: Starter,
    sidecar: SidecarProcess,
    incomplete: Mapping[str, str | None],
    conversations: list[list[int]],
) -> None:
    server = start(*ONE_SLOT, sidecar=sidecar, env=incomplete)
    server.complete(conversations[0])
    wait_refused(server)  # without a further request
    for conversation in conversations:
        server.complete(conversation)
    ((whole, known),) = REFUSED.findall(server.log.read_text())
    assert int(whole) == int(known) + MORE
    said = f"llama.cpp keeps {whole} bytes of a sequence, of which {known} are known here"
    told = sidecar.wait(lambda stat: any(not one.tiered for one in stat.runners), "it says why not")
    assert [one.reason for one in told.runners] == [said]


def test_it_is_served_as_in_stock(
    start: Starter,
    sidecar: SidecarProcess,
    incomplete: Mapping[str, str | None],
    conversations: list[list[int]],
) -> None:
    """Also the very first conversation is in the server's own cache of prompts."""
    asked = [*conversations, [*conversations[0], 7], [*conversations[1], 8]]
    resident = start(*ONE_SLOT, env=UNSAID)
    wanted = [resident.complete(prompt) for prompt in asked]
    assert [answer.cached for answer in wanted] == [0, 0, PROMPT, PROMPT]
    resident.kill()
    server = start(*ONE_SLOT, sidecar=sidecar, env=incomplete)
    assert [server.complete(prompt) for prompt in asked] == wanted
    assert REFUSED.search(server.log.read_text())


def test_nothing_is_stored_or_offered(
    start: Starter,
    sidecar: SidecarProcess,
    incomplete: Mapping[str, str | None],
    conversations: list[list[int]],
) -> None:
    server = start(*ONE_SLOT, sidecar=sidecar, env=incomplete)
    server.complete(conversations[0])
    wait_refused(server)
    server.complete(conversations[1])
    server.kill()
    again = start(*ONE_SLOT, sidecar=sidecar, env=incomplete)
    assert again.complete([*conversations[0], 7]).cached == 0
    wait_refused(again)
    stat = sidecar.stat()
    assert sum(one.blocks for one in stat.namespaces) == 0
    assert sum(use.restored_tokens for use in stat.model_uses) == 0
    for place in (sidecar.local_dir, sidecar.ram_dir):
        assert not list(place.rglob(f"*{BLOCK_SUFFIX}*"))
