"""Prompts behind images: what a killed server knew of them comes back, the encoder is not asked, and
the answer is that of the resident cache. Rows of one image are never another's.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.engine_llama_server.pictures import (
    KINDS,
    Part,
    Picture,
    ask,
    projector_for,
    rows_in,
)
from tests.engine_llama_server.server import LlamaServer, Starter
from tests.engine_llama_server.test_llama_server import report
from tests.engine_llama_server.test_states import settled
from tests.sidecar import SidecarProcess

CAT, DOG, COW = Picture(1), Picture(2), Picture(3)
OPTIONS = ("-fa", "on", "-c", "8192")
ENCODES = "encoding mtmd batch"  # what the server says before it does, with -lv 4


def text(seed: int, count: int) -> str:
    rng = random.Random(seed)
    return "".join(chr(rng.randint(33, 126)) for _ in range(count))


PROMPTS: dict[str, list[Part]] = {
    "at the start": [CAT, text(1, 200)],
    "in the middle": [text(2, 90), CAT, text(3, 130)],
    "near the end": [text(4, 200), CAT, text(5, 5)],
    "two": [text(6, 30), CAT, text(7, 40), DOG, text(8, 100)],
    "side by side": [text(9, 70), CAT, DOG, text(10, 90)],
    "twice the same": [text(11, 20), CAT, "and", CAT, text(12, 60)],
    "of another shape": [text(13, 64), Picture(4, 112, 224), text(14, 50), COW, text(15, 30)],
}
MORE = [text(16, 20), text(17, 20)]

Run = Callable[..., LlamaServer]


@pytest.fixture
def run(start: Starter, tmp_path: Path) -> Run:
    """Starts a server that takes images; tiered if a sidecar is given."""

    def begin(
        kind: str, sidecar: SidecarProcess | None = None, *options: str, seed: int = 1, slots: int = 1
    ) -> LlamaServer:
        projector = str(projector_for(kind, tmp_path, seed))
        given = ("--mmproj", projector, "-np", str(slots), *OPTIONS, *options, "-lv", "4")
        return start(KINDS[kind][0], *given, sidecar=sidecar)

    return begin


def encodings(server: LlamaServer) -> int:
    return server.log.read_text(errors="replace").count(ENCODES)


@pytest.mark.parametrize("where", PROMPTS)
@pytest.mark.parametrize("kind", KINDS)
def test_after_a_kill_the_answer_is_that_of_the_resident_cache(
    kind: str, where: str, run: Run, sidecar: SidecarProcess
) -> None:
    prompt = [*PROMPTS[where], MORE[0]]
    stock = run(kind)
    cold = ask(stock, prompt)
    resident = ask(stock, [*prompt, MORE[1]])
    stock.kill()
    assert resident.cached >= cold.computed - 4

    server = run(kind, sidecar)
    assert ask(server, prompt) == cold
    settled(sidecar, server)
    server.kill()
    server = run(kind, sidecar)
    restored = ask(server, [*prompt, MORE[1]])
    assert report(sidecar, server, 1).restored_tokens > 0
    assert restored.cached == resident.cached
    assert restored.bits == resident.bits
    assert encodings(server) == 0
