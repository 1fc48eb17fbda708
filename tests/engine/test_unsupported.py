"""A model that cannot be tiered runs as in stock Ollama and says so once, with the reason."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.engine.harness import Server, Sidecar, assert_same, text, wait_until

ROUNDED = {
    "OLLAMA_FLASH_ATTENTION": "1",
    "OLLAMA_KV_CACHE_TYPE": "q8_0",
    "OLLAMA_KV_TIER_ENCODING": "q8_0",
}
CASES = [pytest.param("g2", ROUNDED, id="rounded twice")]
REASONS = {"g2": "OLLAMA_KV_TIER_ENCODING"}


@pytest.mark.parametrize(("model", "env"), CASES)
def test_unsupported_model_runs_as_stock_and_says_so_once(
    binary: Path, models: Path, tmp_path: Path, sidecar: Sidecar, model: str, env: dict[str, str]
) -> None:
    prompts = [text(300, model), text(300, model), text(200, model) + text(40, "other")]
    with Server(binary, tmp_path / "reference", models, env=env) as reference:
        expected = [reference.generate(model, prompt) for prompt in prompts]
    with Server(binary, tmp_path / "tested", models, socket=sidecar.socket, env=env) as server:
        for prompt, answer in zip(prompts, expected, strict=True):
            assert_same(server.generate(model, prompt), answer)
        pid = server.runner_pid(model)
        report = wait_until(
            "the reason is reported",
            lambda: (found := sidecar.report(pid)).pid and found,
        )
        assert not report.tiered
        assert report.model == server.blob(model)
        said = [line for line in server.lines() if "kv tiering is off for this model" in line]
        assert len(said) == 1
        assert f'reason="{report.reason}' in said[0]
        assert REASONS[model] in report.reason
        assert "kv tiering is on" not in server.log_text()
    stat = sidecar.stat()
    assert (stat.has_calls, stat.put_blocks) == (0, 0)
