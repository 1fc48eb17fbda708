"""Models that go on at checkpoints or windows, and one with positions of several dimensions, in the
real `ollama serve`: a conversation goes on after an unload and after a kill as it would in memory.
"""

from __future__ import annotations

import signal
from collections.abc import Callable
from pathlib import Path

import pytest

from ollama_tiering.models.make import make_model
from ollama_tiering.models.shapes import make_shape
from tests.engine_ollama_llama_server.servers import Stock, Up, add_model
from tests.engine_ollama_llama_server.test_ollama_llama_server import CHARACTERS, START, text

KINDS = ("gemma3-tiny", "lfm2-tiny", "qwen2vl-tiny")
TURNS = [text(seed, 90) for seed in (5, 6)]


@pytest.mark.parametrize("model", KINDS)
def test_a_conversation_goes_on_as_in_memory(
    start_stock: Callable[..., Stock],
    start_up: Callable[..., Up],
    models: Path,
    tmp_path: Path,
    model: str,
) -> None:
    made = tmp_path / f"{model}.gguf"
    make_model(make_shape(model), made)
    add_model(models, model, made)

    stock = start_stock()
    prompts, said = [START], [stock.generate(model, START)]
    for turn in TURNS:
        prompts.append(prompts[-1] + said[-1].text + turn)
        said.append(stock.generate(model, prompts[-1]))
    stock.kill()

    up = start_up()
    assert up.generate(model, prompts[0]) == said[0]
    up.wait_stored(10)
    up.unload(model)
    assert up.generate(model, prompts[1]) == said[1]
    (runner,) = up.runners()
    first = up.restored([runner.pid])
    assert first >= CHARACTERS * 9 // 10
    up.wait_stored(12)

    up.daemon().send_signal(signal.SIGKILL)
    runner.send_signal(signal.SIGKILL)
    assert up.process is not None
    assert up.process.wait(60) == 9
    again = start_up()
    assert again.generate(model, prompts[2]) == said[2]
    (runner,) = again.runners()
    assert again.restored([runner.pid]) > first
