"""Caches of the Go engine other than one plain cache: several children, rows of different sizes,
models that take images. Text comes back as stock's in-memory hit, bit for bit, after a restart of
everything.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.engine.test_restore import EXCHANGES, Rig, running, until_heard

# Prompts are longer than the window of "sinks"; what its layers no longer see is kept up to 4,096.
MODELS = ("sinks", "wide", "vision", "mrope", "latent")

# flash attention, slots, attention on the CPU, type of the cache
STOCK, OFF, EXACT = (1, 1, "stock", "f16"), (0, 1, "stock", "f16"), (1, 1, "exact", "f16")
SLOTS, QUANTISED = (1, 2, "stock", "f16"), (1, 1, "stock", "q8_0")
OFTEN = [(STOCK, model) for model in MODELS]
OFTEN += [(rig, "sinks") for rig in (EXACT, SLOTS, QUANTISED)] + [(EXACT, "wide"), (OFF, "latent")]
PRODUCT = [
    pytest.param(
        rig,
        model,
        id=f"fa{rig[0]}-slots{rig[1]}-{rig[2]}-{rig[3]}-{model}",
        marks=() if (rig, model) in OFTEN else pytest.mark.slow,
    )
    for rig in (STOCK, OFF, EXACT, SLOTS, QUANTISED)
    for model in MODELS
]


@pytest.fixture(scope="module")
def rig(
    request: pytest.FixtureRequest,
    binary: Path,
    models: Path,
    tmp_path_factory: pytest.TempPathFactory,
) -> Iterator[Rig]:
    flash_attention, slots, attention, cache_type = request.param
    env = {
        "OLLAMA_FLASH_ATTENTION": flash_attention,
        "OLLAMA_NUM_PARALLEL": slots,
        "OLLAMA_CPU_ATTENTION": attention,
        "OLLAMA_KV_CACHE_TYPE": cache_type,
    }
    with running(binary, models, tmp_path_factory.mktemp("caches"), env) as found:
        yield found


@pytest.mark.parametrize(("rig", "model"), PRODUCT, indirect=["rig"])
def test_it_comes_back_as_it_was_after_a_restart_of_everything(rig: Rig, model: str) -> None:
    left = list(EXCHANGES)

    def exchanges(attempt: int) -> None:
        prompts, expected = [], []
        for exchange in left:
            seed = f"{exchange.name} {model} {attempt}"
            prompt, _ = exchange.run(rig.reference, model, seed)
            expected.append(rig.reference.generate(model, prompt, **exchange.options))
            assert exchange.run(rig.server, model, seed)[0] == prompt
            prompts.append(prompt)
        rig.displace(model, attempt)
        rig.server.stop()
        rig.sidecar.restart()
        rig.server.start()
        for exchange, prompt, reference in zip(list(left), prompts, expected, strict=True):
            rig.check(exchange.name, reference, model, prompt, **exchange.options)
            left.remove(exchange)

    until_heard(exchanges)
