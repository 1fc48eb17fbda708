"""`tiering warm` on a real server: the first request after a restart finds what was warmed."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

from ollama_tiering.warm.prompt import of_parts
from tests.engine.harness import Server, Sidecar, wait_until

OPTIONS = {"num_ctx": 1024, "num_thread": 1, "num_predict": 4, "temperature": 0}
SYSTEM = "You are a guide to a house with many rooms, and know each of its chairs. " * 6


def warm(
    sidecar: Sidecar, server: Server, models: Path, *arguments: str
) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "ollama_tiering", "warm", *arguments]
    return subprocess.run(
        [*command, "--socket", str(sidecar.socket), "--host", server.url],
        env={**sidecar.environment(), "OLLAMA_MODELS": str(models)},
        capture_output=True,
        text=True,
    )


def ask(server: Server, model: str = "chat", **more: Any) -> dict[str, Any]:
    messages = [
        {"role": "system", "content": SYSTEM},
        {"role": "user", "content": "How many chairs are in room 12?"},
    ]
    body = {"model": model, "messages": messages, "stream": False, "options": OPTIONS, **more}
    return server.post("/api/chat", json={**body, "logprobs": True, "top_logprobs": 5})


def test_the_first_request_after_a_restart_finds_the_system_prompt(
    binary: Path, models: Path, tmp_path: Path, sidecar: Sidecar
) -> None:
    prompt = tmp_path / "system.txt"
    prompt.write_text(SYSTEM)
    options = ["-o", "num_ctx=1024", "-o", "num_thread=1"]
    with Server(binary, tmp_path / "s", models, socket=sidecar.socket) as server:
        done = warm(
            *(sidecar, server, models, "chat", "--system", str(prompt), *options),
            *("--pin", "--json"),
        )
        assert done.returncode == 0, done.stderr
        (said,) = json.loads(done.stdout)["prompts"]
        server.restart()
        answer = ask(server)
        pid = server.runner_pid("chat")
        wait_until("the request is reported", lambda: sidecar.report(pid).requests)
        report = sidecar.report(pid)
    with Server(binary, tmp_path / "plain", models) as plain:  # without tiering
        plain.post("/api/chat", json=of_parts("chat", system=SYSTEM, options=OPTIONS).request)
        from_memory = ask(plain)
    assert said["pinned"]
    assert 64 <= said["stored_tokens"] <= said["prompt_tokens"]
    assert report.last_request.memory_tokens == 0
    # All up to what the user says, which nobody knew; the template puts some words between them.
    assert report.last_request.restored_tokens > 0.8 * said["prompt_tokens"]
    assert answer["message"] == from_memory["message"]
    assert answer["logprobs"] == from_memory["logprobs"]


def test_a_model_that_is_not_there_is_said(
    binary: Path, models: Path, tmp_path: Path, sidecar: Sidecar
) -> None:
    prompt = tmp_path / "system.txt"
    prompt.write_text(SYSTEM)
    with Server(binary, tmp_path / "s", models, socket=sidecar.socket) as server:
        done = warm(sidecar, server, models, "nobody", "--system", str(prompt))
    assert done.returncode == 9
    assert "nobody" in done.stderr


def test_what_cannot_be_stored_is_an_error(
    binary: Path, models: Path, tmp_path: Path, sidecar: Sidecar
) -> None:
    prompt = tmp_path / "system.txt"
    prompt.write_text(SYSTEM)
    with Server(binary, tmp_path / "s", models) as server:  # tiering is off
        done = warm(sidecar, server, models, "chat", "--system", str(prompt))
    assert done.returncode == 1
    assert "nothing of the prompt is stored" in done.stderr
