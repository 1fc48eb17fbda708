"""Why a prompt was computed: `tiering status` says it of real requests, on both engines."""

from __future__ import annotations

import json
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from tests.engine.harness import BLOCK_TOKENS, Server, Sidecar, text, wait_until

TOKENS = 300


def status(sidecar: Sidecar, *options: str) -> str:
    command = [sys.executable, "-m", "ollama_tiering", "status", "--socket", str(sidecar.socket)]
    done = subprocess.run(
        [*command, *options], env=sidecar.environment(), capture_output=True, text=True, check=True
    )
    return done.stdout


def asked(sidecar: Sidecar, server: Server, model: str, prompt: str, **options: Any) -> Any:
    """What is said of the model's runner once the prompt is answered and stored."""
    answer = server.generate(model, prompt, **options)
    sidecar.settle(server, model)
    pid = server.runner_pid(model)
    runners = json.loads(status(sidecar, "--json"))["runners"]
    (found,) = (runner for runner in runners if runner["pid"] == pid)
    last = found["last_request"]
    assert last["prompt_tokens"] == len(prompt)
    assert last["memory_tokens"] + last["restored_tokens"] == answer.resumed
    return found


@pytest.mark.parametrize(
    ("model", "engine"), [("g2", "ollama-go"), ("llama", "llama.cpp")], ids=["go", "llama.cpp"]
)
def test_every_prompt_that_is_computed_has_its_reason_in_status(
    binary: Path, models: Path, tmp_path: Path, sidecar: Sidecar, model: str, engine: str
) -> None:
    prompt = text(TOKENS, "first")
    changed = prompt[:200] + "\n" + text(TOKENS, "changed")[201:]
    with Server(binary, tmp_path / "s", models, socket=sidecar.socket) as server:

        def why(prompt: str, **options: Any) -> str | None:
            found = asked(sidecar, server, model, prompt, **options)
            assert found["to_store"] == 0
            settings = found["settings"]
            assert (settings["slots"], settings["num_thread"]) == (1, 1)
            assert 2048 <= settings["num_ctx"] < 4096
            assert settings["num_batch"] >= 256
            said: str | None = found["last_request"]["why"]
            return said

        assert why(prompt, predict=1) == "nothing stored begins like this prompt"
        assert why(prompt, predict=1) is None  # from memory
        assert why(text(40, "short")) == "shorter than min_tokens (64)"
        lines = status(sidecar).splitlines()
        at = next(i for i, line in enumerate(lines) if line.startswith("runner "))
        assert f": tiered, {engine}/" in lines[at]
        assert lines[at + 1] == "  caches: plain f16"
        at = lines.index("  recomputed, by reason:")
        assert lines[at + 1 : at + 4] == [
            f"    {TOKENS} tokens of 1 request: nothing stored begins like this prompt",
            "    40 tokens of 1 request: shorter than min_tokens (64)",
            "  last request: 40 prompt tokens = 0 in memory + 0 restored + 40 recomputed",
        ]

        server.unload(model)
        differs = "prompt differs from the stored one at token 200"
        assert why(changed) == differs
        server.unload(model)
        assert why(prompt, predict=1) is None  # restored
        server.unload(model)
        ends = f"what is stored of the prompt ends at token {TOKENS}"
        assert why(prompt + text(100, "next turn"), predict=1) == ends
        server.unload(model)

    recompute = {"OLLAMA_KV_TIER_GATE": "recompute"}
    folder = tmp_path / "recompute"
    with Server(binary, folder, models, socket=sidecar.socket, env=recompute) as server:
        found = asked(sidecar, server, model, prompt)
        assert found["last_request"]["why"] == "set to recompute (OLLAMA_KV_TIER_GATE)"
        assert found["shortfalls"] == [{"reason": "recompute", "requests": 1, "tokens": TOKENS}]
    uses = json.loads(status(sidecar, "--json"))["model_uses"]
    assert {one["reason"] for use in uses for one in use["shortfalls"]} == {
        "nothing_stored",
        "too_short",
        "differs",
        "ends",
        "recompute",
    }


def test_a_request_without_a_sidecar_says_so_when_one_is_back(
    binary: Path, models: Path, tmp_path: Path, sidecar: Sidecar
) -> None:
    with Server(binary, tmp_path / "s", models, socket=sidecar.socket) as server:
        asked(sidecar, server, "g2", text(TOKENS, "first"))
        sidecar.stop()
        server.generate("g2", text(TOKENS, "alone"))
        sidecar.start()
        pid = server.runner_pid("g2")
        wait_until("the runner is heard again", lambda: sidecar.report(pid).requests == 2)
        assert "    sidecar was away, tiering paused" in status(sidecar).splitlines()


def test_settled_is_stored_whatever_was_asked_at_once(
    binary: Path, models: Path, tmp_path: Path, sidecar: Sidecar
) -> None:
    env = {"OLLAMA_NUM_PARALLEL": 4}
    prompts = [text(10 * BLOCK_TOKENS, ("at once", number)) for number in range(4)]
    with Server(binary, tmp_path / "s", models, socket=sidecar.socket, env=env) as server:
        server.generate("g2", text(TOKENS, "load"), num_ctx=1024)
        sidecar.settle(server, "g2")
        before = len(sidecar.block_files(sidecar.ram_dir))
        bodies = [server.body("g2", one, num_ctx=1024, predict=1) for one in prompts]
        with ThreadPoolExecutor(len(bodies)) as pool:
            list(pool.map(lambda body: server.post("/api/generate", json=body), bodies))
        pid = server.runner_pid("g2")
        assert pid is not None
        server.requests_of[pid] += len(bodies)
        assert sidecar.settle(server, "g2").to_store == 0
        stored = len(sidecar.block_files(sidecar.ram_dir)) - before
        assert stored >= 10 * len(prompts)
