"""Drafts that hold no rows of their own: gemma 4's assistants, whose layers read the target's, and
n-grams beside windows. What a killed server knew comes back as if it were resident.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.engine_llama_server.gemma4 import make_assistant
from tests.engine_llama_server.server import Answer, LlamaServer, Starter
from tests.engine_llama_server.test_llama_server import report, text
from tests.engine_llama_server.test_states import settled
from tests.sidecar import SidecarProcess

COUNT = 60
ONE_SLOT = ("-fa", "on", "-np", "1", "-c", "4096")
NGRAMS = ("--spec-type", "ngram-simple", "--spec-ngram-simple-size-n", "3")
MTP = ("--spec-type", "draft-mtp", "--spec-draft-n-max", "4", "--no-warmup")  # of what is no row


@pytest.fixture
def ways(tmp_path: Path) -> dict[str, tuple[str, ...]]:
    assistant = tmp_path / "assistant.gguf"
    make_assistant(assistant)
    return {
        "an assistant": ("gemma4-plain", *ONE_SLOT, *MTP, "-md", str(assistant)),
        "n-grams": ("gemma3-tiny", *ONE_SLOT, *NGRAMS),
    }


@pytest.mark.parametrize("way", ["an assistant", "n-grams"])
def test_a_conversation_goes_on_after_a_kill_as_if_it_were_resident(
    start: Starter, sidecar: SidecarProcess, ways: dict[str, tuple[str, ...]], way: str
) -> None:
    rng = random.Random(51)
    prompt = text(rng, 20) * 35  # n-grams draft what is said again
    more, again = text(rng, 40, first=3), text(rng, 30, first=4)

    def turns(server: LlamaServer, between: Callable[[LlamaServer], LlamaServer]) -> list[Answer]:
        said = [server.complete(prompt, COUNT)]
        second = [*prompt, *said[0].tokens, *more]
        server = between(server)
        said.append(server.complete(second, COUNT))
        server = between(server)
        said.append(server.complete([*second, *said[1].tokens, *again], COUNT))
        return said

    stock = start(*ways[way])
    wanted = turns(stock, lambda server: server)
    stock.kill()
    assert sum(one.drafted for one in wanted) > 0
    restored: list[int] = []

    def killed(server: LlamaServer) -> LlamaServer:
        settled(sidecar, server)
        restored.append(report(sidecar, server, 1).restored_tokens)
        server.kill()
        return start(*ways[way], sidecar=sidecar)

    said = turns(start(*ways[way], sidecar=sidecar), killed)
    assert [one.cached for one in said] == [one.cached for one in wanted]
    # What is drafted decides how many rows of an answer are computed at once, and so their last
    # bits: after a restart the first drafts are others. A prompt's rows do not depend on it.
    assert said[0].bits == wanted[0].bits
    assert said[1].tokens == wanted[1].tokens
    assert said[1].bits[0] == wanted[1].bits[0]
    assert said[2].tokens[0] == wanted[2].tokens[0]
    assert restored[1] >= len(prompt)


def test_a_draft_with_rows_of_its_own_is_refused(
    start: Starter, sidecar: SidecarProcess, model: Callable[[str], Path]
) -> None:
    draft = ("--spec-type", "draft-simple", "-md", str(model("llama-tiny")))
    server = start("llama-tiny", *ONE_SLOT, *draft, sidecar=sidecar)
    prompt = text(random.Random(52), 300)
    assert server.complete(prompt, COUNT).drafted > 0
    stat = sidecar.wait(lambda stat: len(stat.runners) > 0, "it says why")
    assert [(one.tiered, one.reason) for one in stat.runners] == [(False, "speculative decoding")]
