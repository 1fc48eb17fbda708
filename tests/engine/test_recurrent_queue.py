"""Requests that wait for the one slot of a model with recurrent layers.

When an answer ends, a batch with its last token is already built, and changes the states when it is
computed. Whoever goes on from a checkpoint's states must not have them changed by it, and nothing
that follows from such states may be stored.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from tests.engine.harness import Result, Server, Sidecar, result_of, text

MODEL = "delta"
CONTEXT = {"num_ctx": 4096}
CLIENTS, TIMES = 4, 3


@pytest.fixture(scope="module", autouse=True)
def since(need: Callable[[str], None]) -> None:
    need(MODEL)


def at_once(server: Server, prompt: str) -> list[Result]:
    def one(number: int) -> Result:
        body = server.body(MODEL, prompt, predict=8, **CONTEXT)
        return result_of(server.post("/api/generate", json=body), -1, 0)

    with ThreadPoolExecutor(CLIENTS) as pool:
        answers = list(pool.map(one, range(CLIENTS * TIMES)))
    if pid := server.runner_pid(MODEL):
        server.requests_of[pid] = server.requests_of.get(pid, 0) + len(answers)
    return answers


def alone(server: Server, prompt: str) -> Iterator[Result]:
    """Computed cold, and gone on with from the checkpoint, when nothing is under way."""
    for _ in range(2):
        yield server.generate(MODEL, prompt, predict=8, **CONTEXT)
        time.sleep(0.2)


@pytest.mark.timeout(240)
def test_who_has_waited_is_answered_as_when_alone(
    binary: Path, models: Path, tmp_path: Path, sidecar: Sidecar
) -> None:
    prompt = text(700, "queue")
    with Server(binary, tmp_path / "reference", models) as reference:
        expected = list(alone(reference, prompt))
        stock = [answer.logprobs for answer in at_once(reference, prompt)]
    assert [one.resumed for one in expected] == [0, 512]
    right = [one.logprobs for one in expected]
    with Server(binary, tmp_path / "tested", models, socket=sidecar.socket) as server:
        answers = at_once(server, prompt)
        sidecar.settle(server, MODEL)
        server.unload(MODEL)
        after = server.generate(MODEL, prompt, predict=8, **CONTEXT)
    print(f"stock: {sum(one not in right for one in stock)} of {len(stock)} are others")
    assert all(answer.logprobs in right for answer in answers)
    assert after.resumed == 512
    assert after.logprobs == expected[1].logprobs
