"""The three counts of tokens add up whatever becomes of a request, and what is said to be saved is
what was measured.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest

from ollama_tiering.protocol.pb import administration_pb2 as adm
from ollama_tiering.protocol.seconds_saved import Saved
from ollama_tiering.store.block.pb import block_store_pb2 as pb
from tests.engine.harness import Server, Sidecar, text, wait_until

MODEL = "slow"


@pytest.fixture
def sidecar(tmp_path: Path, fast: Path, models: Path) -> Iterator[Sidecar]:
    env = {"OLLAMA_MODELS": str(models)}  # where names are
    with Sidecar(tmp_path / "sidecar", fast, env=env) as running:
        yield running


def adds_up(one: pb.RunnerReport | adm.ModelUse) -> None:
    parts = one.memory_tokens + one.restored_tokens + one.recomputed_tokens
    assert parts == one.prompt_tokens


def hang_up(server: Server, prompt: str) -> None:
    """Begins a request and goes away while its prompt is computed."""
    body = server.body(MODEL, prompt, predict=200, logprobs=False)
    with contextlib.suppress(httpx.ReadTimeout):
        server.http.post(server.url + "/api/generate", json=body, timeout=0.3)


@pytest.mark.timeout(240)
def test_counts_add_up_and_seconds_are_saved_that_were_measured(
    binary: Path, models: Path, tmp_path: Path, sidecar: Sidecar
) -> None:
    prompt = text(1200, "counts")
    asked = 0
    with Server(binary, tmp_path / "s", models, socket=sidecar.socket) as server:
        cold = server.generate(MODEL, prompt)
        server.generate(MODEL, prompt)  # from memory
        server.generate(MODEL, text(700, "shift"), num_ctx=2048, predict=8)
        asked += 2 * 1200 + 700
        first = sidecar.settle(server, MODEL)
        adds_up(first)
        assert (first.requests, first.prompt_tokens) == (3, asked)
        assert first.restored_tokens == 0
        assert first.recomputed_tokens >= 1200 + 1 + 600
        # The step after the hit is no prefill; what was measured is what the runner says it took.
        assert 1200 <= first.prefill_tokens <= 1200 + 700 + 16
        assert cold.prompt_seconds <= first.prefill_seconds < 100

        # A client that hangs up: the runner computes its prompt to the end, and that is counted.
        hang_up(server, text(1000, "hung up"))
        pid = server.runner_pid(MODEL)
        wait_until("the request has ended", lambda: sidecar.report(pid).requests == 4)
        asked += 1000
        gone = sidecar.report(pid)
        adds_up(gone)
        assert gone.prompt_tokens == asked

        # An answer that outgrows its context is shifted: what is turned or computed again for that
        # is no prompt.
        server.unload(MODEL)
        server.generate(MODEL, text(200, "long answer"), num_ctx=256, predict=120)
        shifted = sidecar.settle(server, MODEL)
        adds_up(shifted)
        assert shifted.prompt_tokens == 200
        asked += 200
        server.unload(MODEL)

        restored = server.generate(MODEL, prompt)
        assert restored.resumed == 1199
        asked += 1200
        last = sidecar.settle(server, MODEL)
        adds_up(last)
        assert last.restored_tokens == 1199
        assert last.prefill_tokens == 0  # one token was computed: no measure of anything
        assert 0 < last.restore_seconds < 10
        server.unload(MODEL)

        wait_until("no runner is alive", lambda: not sidecar.stat().runners)
        answer = sidecar.stat()
        (use,) = answer.model_uses
        adds_up(use)
        assert use.name == f"{MODEL}:latest"
        assert not use.loaded
        assert (use.requests, use.prompt_tokens) == (6, asked)
        assert use.restored_tokens >= 1199
        saved = Saved.of([use])
        assert saved.seconds is not None
        assert math.isfinite(saved.seconds)
        # Within a factor of what the same prompt took when it was computed.
        assert 0.3 < saved.compute_seconds / use.restored_tokens * 1199 / cold.prompt_seconds < 3
        assert saved.compute_seconds - 10 < saved.seconds < saved.compute_seconds

    sidecar.restart()
    uses = list(answer.model_uses)
    wait_until("all of it is told again", lambda: list(sidecar.stat().model_uses) == uses)
