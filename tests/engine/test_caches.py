"""Caches of the Go engine other than one plain cache: several children, rows of different sizes,
models that take images. Text comes back as stock's in-memory hit, bit for bit, after a restart of
everything.
"""

from __future__ import annotations

from collections.abc import Callable

import pytest

from tests.engine.test_restore import Rig, come_back, rigs, settings

# Prompts are longer than the windows of "sinks" and "shared", and than a chunk; what a layer does
# not see any more is kept up to 4,096 tokens, and of chunks all of it.
MODELS = ("sinks", "wide", "vision", "mrope", "latent", "heads", "chunks", "shared")

# flash attention, slots, attention on the CPU, type of the cache
STOCK, OFF, EXACT = (1, 1, "stock", "f16"), (0, 1, "stock", "f16"), (1, 1, "exact", "f16")
SLOTS, QUANTISED = (1, 2, "stock", "f16"), (1, 1, "stock", "q8_0")
OFTEN = [(STOCK, model) for model in MODELS]
OFTEN += [(rig, "sinks") for rig in (EXACT, SLOTS, QUANTISED)] + [(OFF, "latent")]
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


rig = rigs(settings)


@pytest.mark.parametrize(("rig", "model"), PRODUCT, indirect=["rig"])
def test_it_comes_back_as_it_was_after_a_restart_of_everything(
    need: Callable[[str], None], rig: Rig, model: str
) -> None:
    need(model)

    def restart() -> None:
        rig.server.stop()
        rig.sidecar.restart()
        rig.server.start()

    come_back(rig, model, restart)
