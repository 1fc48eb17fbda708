"""What `tiering why` makes of a real chat that outgrows its context."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

from tests.engine.harness import Server, Sidecar

CONTEXT = 1024
OPTIONS = {"num_ctx": CONTEXT, "num_thread": 1, "num_predict": 1, "temperature": 0}


def why(sidecar: Sidecar, models: Path) -> list[dict[str, Any]]:
    command = [sys.executable, "-m", "ollama_tiering", "why", "--json"]
    done = subprocess.run(
        [*command, "--socket", str(sidecar.socket)],
        env={**sidecar.environment(), "OLLAMA_MODELS": str(models)},
        capture_output=True,
        text=True,
        check=True,
    )
    found: list[dict[str, Any]] = json.loads(done.stdout)["partings"]
    return found


def test_a_chat_that_outgrows_num_ctx_is_told_from_one_that_goes_on(
    binary: Path, models: Path, tmp_path: Path, sidecar: Sidecar
) -> None:
    said = [{"role": "system", "content": "You are a guide to a house with many rooms. " * 4}]
    with Server(binary, tmp_path / "s", models, socket=sidecar.socket) as server:
        verdicts = []
        for number in range(8):
            said.append({"role": "user", "content": f"{number}: what is in room {number}? " * 3})
            body = {"model": "chat", "messages": said, "stream": False, "options": OPTIONS}
            server.post("/api/chat", json=body)
            sidecar.settle(server, "chat")
            said.append({"role": "assistant", "content": f"There are {number} chairs in it. " * 3})
            verdicts.append({one["verdict"] for one in why(sidecar, models) if one["is_fault"]})
        latest = next(one for one in why(sidecar, models) if one["is_fault"])
    assert verdicts[:3] == [set()] * 3
    assert verdicts[-1] == {"cut_prompt"}
    assert "Ollama cut the prompt" in latest["what"]
    assert latest["prompt_tokens"] <= CONTEXT
    assert latest["part"] in ("user", "assistant")  # what comes behind what was cut
    assert 64 <= latest["lost_tokens"] < latest["computed_tokens"]
    assert "num_ctx" in latest["cure"]
