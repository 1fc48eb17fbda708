"""Conversations side by side with a model whose windows drop rows: what comes back, comes back into
cells that other slots want, too.
"""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from tests.engine.harness import Result, Server, Sidecar, result_of, text
from tests.engine.test_storm import disagreement

MODEL, CONTEXT = "sliding", 1024
CONVERSATIONS, CLIENTS, SLOTS = 8, 4, 2
# Other cells, other batches: other last bits of stock's attention. Rows of another content make
# ten times as much. What comes back needs the cells it lay in: at least one finds them free. With
# exact attention nothing of that is so.
STOCK = ({"OLLAMA_FLASH_ATTENTION": "0"}, 0.03, 1)
EXACT = ({"OLLAMA_CPU_ATTENTION": "exact"}, 0.0, 2 * CONVERSATIONS)


def ask(server: Server, prompts: Sequence[str], clients: int) -> list[Result]:
    def one(prompt: str) -> Result:
        body = server.body(MODEL, prompt, num_ctx=CONTEXT)
        return result_of(server.post("/api/generate", json=body), -1, 0)

    with ThreadPoolExecutor(clients) as pool:
        answers = list(pool.map(one, prompts))
    if pid := server.runner_pid(MODEL):
        server.requests_of[pid] = server.requests_of.get(pid, 0) + len(prompts)
    return answers


@pytest.mark.timeout(300)
@pytest.mark.parametrize(("env", "noise", "least"), [STOCK, EXACT], ids=["stock", "exact"])
def test_conversations_beside_each_other_go_on_after_a_restart(
    binary: Path,
    models: Path,
    tmp_path: Path,
    sidecar: Sidecar,
    env: dict[str, str],
    noise: float,
    least: int,
) -> None:
    parallel = env | {"OLLAMA_NUM_PARALLEL": str(SLOTS)}
    turns = [[text(150 + 83 * n, ("beside", n)) for n in range(CONVERSATIONS)]]
    answers: list[list[Result]] = []
    with Server(binary, tmp_path / "tested", models, socket=sidecar.socket, env=parallel) as server:
        for _ in range(3):
            answers.append(ask(server, turns[-1], CLIENTS))
            sidecar.settle(server, MODEL)
            server.unload(MODEL)
            turns.append(
                [
                    prompt + answer.text + text(40, (len(turns), number))
                    for number, (prompt, answer) in enumerate(
                        zip(turns[-1], answers[-1], strict=True)
                    )
                ]
            )
        restores = len(server.restores())
        log = server.log_text()
    for words in ("kv tiering failed", "left a gap", "panic"):
        assert words not in log
    assert restores >= least, restores
    wrong = []
    with Server(binary, tmp_path / "reference", models, env=env) as reference:
        for prompts, given in zip(turns, answers, strict=False):
            for expected, answer in zip(ask(reference, prompts, 1), given, strict=True):
                found = disagreement(answer, expected, len(expected.logprobs), noise)
                wrong += [found] if found else []
    assert wrong == []
