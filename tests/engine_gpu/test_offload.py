"""Layers on the CPU, and a GPU that computes for them where many tokens come at once."""

from __future__ import annotations

from collections.abc import Callable

from tests.engine.harness import Sidecar
from tests.engine_gpu.engines import CHARACTERS, Engine

PROMPT = "".join(CHARACTERS[number * number % 61] for number in range(300))
BESIDE = {"-ngl": "0"}
WITHOUT = {**BESIDE, "--device": "none"}


def test_rows_with_and_without_a_gpu_beside_are_never_found_by_each_other(
    begin: Callable[..., Engine], sidecar: Sidecar
) -> None:
    restored = []
    for how in (WITHOUT, BESIDE, WITHOUT, BESIDE):
        engine = begin("llama-server", "llama", how, sidecar)
        engine.ask(PROMPT)
        restored.append(engine.restored() > 0)
        engine.settle()
        engine.close()
    assert restored == [False, False, True, True]
