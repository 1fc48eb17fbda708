"""Two prompts take turns on one slot with no pause: the hazard of the batch that was built ahead.

When an answer ends, the batch after its last token is already built and its cell marked; the next
request frees the cell, a restore may take it, and the old batch, computed late, overwrites it. The
model is slow enough that this batch is still being computed when the next request arrives.
"""

from __future__ import annotations

import contextlib
import http.client
import json
from collections.abc import Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from tests.engine.harness import Result, Server, Sidecar, result_of, text

SHORT, LONG = text(200, "short"), text(300, "long")  # LONG is restored over the cells after SHORT
PREDICT = 4
OPTIONS: dict[str, Any] = {"predict": PREDICT, "num_ctx": 1024}


def hits(server: Server) -> tuple[Result, Result]:
    """The in-memory answers to both prompts."""
    answers = []
    for prompt in (SHORT, LONG):
        server.generate("slow", prompt, **OPTIONS)
        answers.append(server.generate("slow", prompt, **OPTIONS))
    return answers[0], answers[1]


def alternate(server: Server, rounds: int) -> list[Result]:
    """Answers to SHORT, LONG, SHORT, …; each request leaves when the answer before is read."""
    bodies = [json.dumps(server.body("slow", prompt, **OPTIONS)) for prompt in (SHORT, LONG)]
    before = len(server.loads())
    answers: list[bytes] = []
    connection = http.client.HTTPConnection(server.url.removeprefix("http://"), timeout=60)
    with contextlib.closing(connection):
        for turn in range(2 * rounds):
            connection.request("POST", "/api/generate", bodies[turn % 2])
            answers.append(connection.getresponse().read())
    loads = server.loads()[before:]
    return [
        result_of(json.loads(answer), load.used, 0)
        for answer, load in zip(answers, loads, strict=True)
    ]


def differing(answers: Iterable[Result], reference: Result) -> list[str]:
    """Answers resumed where the reference was and yet not the same."""
    return [
        f"{answer.prompt_tokens} tokens: {[step.logprob for step in answer.logprobs]} "
        f"not {[step.logprob for step in reference.logprobs]}"
        for answer in answers
        if answer.resumed == reference.resumed and answer.logprobs != reference.logprobs
    ]


def differing_in_turn(
    binary: Path,
    models: Path,
    folder: Path,
    sidecar: Sidecar,
    fa: int,
    rounds: int,
    more_env: Mapping[str, str] | None = None,
) -> list[str]:
    env = {"OLLAMA_FLASH_ATTENTION": fa, **(more_env or {})}
    with Server(binary, folder / "reference", models, env=env) as reference:
        short, long = hits(reference)
    with Server(binary, folder / "tested", models, socket=sidecar.socket, env=env) as server:
        hits(server)
        sidecar.settle(server, "slow")
        answers = alternate(server, rounds)
        # With both cores busy some lookups miss their deadline; those prompts are computed.
        assert len(server.restores()) > rounds, "too few were restored to say anything"
    return differing(answers[::2], short) + differing(answers[1::2], long)


@pytest.mark.parametrize("fa", [1, 0])
def test_prompts_that_take_turns_without_a_pause_get_their_in_memory_answers(
    binary: Path, models: Path, tmp_path: Path, sidecar: Sidecar, fa: int
) -> None:
    assert differing_in_turn(binary, models, tmp_path, sidecar, fa, rounds=12) == []


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_two_hundred_turns_without_a_pause_get_their_in_memory_answers(
    binary: Path, models: Path, tmp_path: Path, sidecar: Sidecar
) -> None:
    assert differing_in_turn(binary, models, tmp_path, sidecar, 1, rounds=100) == []


def test_without_the_rule_the_same_turns_give_wrong_answers(
    no_pending_binary: Path, models: Path, tmp_path: Path, sidecar: Sidecar
) -> None:
    for rounds in (12, 60):  # a machine that is busy with other things may hide it for a while
        wrong = differing_in_turn(
            no_pending_binary, models, tmp_path / str(rounds), sidecar, 1, rounds=rounds
        )
        if wrong:
            break
    assert wrong, "the tests above would not see the hazard"


def take_turns_in_the_runner(server: Server, rounds: int) -> tuple[list[Result], list[Result]]:
    """Two clients of the runner itself, one waiting for the slot while the other has it.

    The server lets no more requests through than a runner has slots, and so hides the case that a
    request waits for the very moment in which another ends.
    """
    pid = server.runner_pid("slow")
    assert pid is not None
    command = server.runners()[pid]
    address = "127.0.0.1:" + command[command.index("--port") + 1]
    before = len(server.loads())

    def ask(prompt: str) -> list[dict[str, Any]]:
        options = {"num_predict": PREDICT, "temperature": 0, "seed": 1}
        request = {"Prompt": prompt, "Options": options, "Shift": True, "Truncate": True}
        body = json.dumps(request | {"Logprobs": True, "TopLogprobs": 5})
        answers = []
        with contextlib.closing(http.client.HTTPConnection(address, timeout=60)) as connection:
            for _ in range(rounds):
                connection.request("POST", "/completion", body)
                parts = [json.loads(line) for line in connection.getresponse()]
                steps = [step for part in parts for step in part.get("logprobs") or []]
                answers.append({"response": "", "done_reason": "", "logprobs": steps, **parts[-1]})
        return answers

    def results(prompt: str, answers: list[dict[str, Any]]) -> list[Result]:
        loads = [load for load in server.loads()[before:] if load.prompt == len(prompt)]
        return [
            result_of(answer, load.used, 0) for answer, load in zip(answers, loads, strict=True)
        ]

    with ThreadPoolExecutor(2) as pool:
        short, long = pool.map(ask, (SHORT, LONG))
    return results(SHORT, short), results(LONG, long)


def test_requests_that_wait_for_the_slot_get_their_in_memory_tokens(
    binary: Path, models: Path, tmp_path: Path, sidecar: Sidecar
) -> None:
    """A restore that goes around a cell makes attention sum in another order: not the same bits."""
    with Server(binary, tmp_path / "tested", models, socket=sidecar.socket) as server:
        expected = hits(server)
        sidecar.settle(server, "slow")
        answers = take_turns_in_the_runner(server, rounds=12)
        assert len(server.restores()) > 5, "too few were restored to say anything"
    for reference, mine in zip(expected, answers, strict=True):
        for answer in mine:
            assert answer.tokens == reference.tokens
            for step, other in zip(answer.logprobs, reference.logprobs, strict=True):
                assert step.logprob == pytest.approx(other.logprob, abs=0.01)
