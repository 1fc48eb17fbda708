"""What the llama.cpp runner has of its own: settings that it refuses, rows that no other engine
finds. That its restores are in-memory hits bit for bit is test_restore.py's business.
"""

from __future__ import annotations

from pathlib import Path

from tests.engine.harness import Server, Sidecar, text, wait_until

MODEL = "llama"


def test_slots_that_stock_cannot_share_prompts_between_are_left_alone(
    binary: Path, models: Path, tmp_path: Path, sidecar: Sidecar
) -> None:
    env = {"OLLAMA_MULTIUSER_CACHE": "1", "OLLAMA_NUM_PARALLEL": "2"}
    with Server(binary, tmp_path / "tested", models, socket=sidecar.socket, env=env) as server:
        server.generate(MODEL, text(300, "alone"))
        pid = server.runner_pid(MODEL)
        report = wait_until(
            "the reason is reported", lambda: (found := sidecar.report(pid)).pid and found
        )
    assert not report.tiered
    assert "OLLAMA_MULTIUSER_CACHE" in report.reason
    stat = sidecar.stat()
    assert (stat.has_calls, stat.put_blocks) == (0, 0)


def test_each_engine_finds_its_own_rows_only(
    binary: Path, models: Path, tmp_path: Path, sidecar: Sidecar
) -> None:
    """One model file, one prompt, the Go engine and llama.cpp: their sums have other orders."""
    prompt = text(400, "engines")
    resumed = []
    for number, new_engine in enumerate((0, 1, 0, 1)):
        env = {"OLLAMA_NEW_ENGINE": new_engine}
        folder = tmp_path / str(number)
        with Server(binary, folder, models, socket=sidecar.socket, env=env) as server:
            resumed.append(server.generate(MODEL, prompt).resumed)
            sidecar.settle(server, MODEL)
    assert resumed == [0, 0, len(prompt) - 1, len(prompt) - 1]
