"""K/V caches in q8_0 and q4_0, on both engines: they come back as they were, bit for bit."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from tests.engine.harness import (
    BLOCK_TOKENS,
    Server,
    Sidecar,
    assert_same,
    in_memory,
    text,
    wait_until,
)
from tests.engine.test_restore import LookupTooSlow, Rig, come_back, rigs, settings, until_heard

MODELS = ("g2", "llama", "cohere2")
SHIFT = "context limit hit - shifting"


# type of the cache, slots, attention on the CPU
rig = rigs(lambda cache_type, slots, attention: settings(1, slots, attention, cache_type))


RIGS = [("q8_0", 1, "stock"), ("q4_0", 1, "stock"), ("q8_0", 1, "exact")]


QUANTISED = [
    pytest.param(
        rig, model, marks=pytest.mark.slow if model == "cohere2" and rig != RIGS[0] else ()
    )
    for rig in RIGS
    for model in MODELS
]


@pytest.mark.parametrize(("rig", "model"), QUANTISED, indirect=["rig"], ids=str)
def test_a_quantised_cache_comes_back_as_it_was(rig: Rig, model: str) -> None:
    come_back(rig, model, rig.server.restart)


SHIFTS = [
    *((("q8_0", 2, "stock"), model) for model in ("g2", "llama")),
    # Its RoPE multiplies by a factor, whatever the angle.
    (("f16", 2, "stock"), "phi"),
]


@pytest.mark.parametrize(("rig", "model"), SHIFTS, indirect=["rig"], ids=str)
def test_a_shift_that_changes_the_rows_of_every_slot_lets_none_of_them_be_stored(
    rig: Rig, model: str
) -> None:
    """Two conversations are in memory, in a slot each. One of them shifts; the other goes on."""
    context, server = 2048, rig.server

    def shift(attempt: int) -> None:
        prompts = [text(600, (name, attempt)) for name in ("one", "two")]
        loads = len(server.loads())
        with ThreadPoolExecutor(1) as pool:  # the first slot is in use when the second is chosen
            long = server.body(model, prompts[0], predict=200)
            first = pool.submit(server.post, "/api/generate", json=long)
            wait_until("the first slot is in use", lambda: len(server.loads()) > loads)
            server.generate(model, prompts[1])
            first.result()
        slots = [load.slot for load in server.loads()[loads:]]
        assert len(set(slots)) == 2
        shifts = server.log_text().count(SHIFT)
        server.generate(model, text(context - 40, ("shift", attempt)), predict=70)
        assert server.log_text().count(SHIFT) > shifts
        other = prompts[1 - slots.index(server.loads()[-1].slot)]
        longer = other + text(200, ("more", attempt))
        assert server.generate(model, longer).resumed >= len(other)  # in memory, as in stock
        rig.sidecar.settle(server, model)
        server.unload(model)
        answer = server.generate(model, longer)
        # What was there before the shift is back; what was computed on top of rounded rows is not.
        if answer.resumed == 0 and server.pauses():
            raise LookupTooSlow
        assert 0 < answer.resumed < len(longer) - 1 - BLOCK_TOKENS
        assert_same(answer, in_memory(rig.reference, model, longer, answer.resumed))

    until_heard(shift)


@pytest.mark.parametrize("model", ["g2", "llama", pytest.param("cohere2", marks=pytest.mark.slow)])
def test_rows_of_another_type_are_not_found(
    binary: Path, models: Path, tmp_path: Path, sidecar: Sidecar, model: str
) -> None:
    prompt = text(400, "types")
    types = ("f16", "q8_0", "q4_0")
    resumed = []
    for number, cache_type in enumerate(types * 2):
        env = {"OLLAMA_FLASH_ATTENTION": 1, "OLLAMA_KV_CACHE_TYPE": cache_type}
        folder = tmp_path / str(number)
        with Server(binary, folder, models, socket=sidecar.socket, env=env) as server:
            resumed.append(server.generate(model, prompt).resumed)
            sidecar.settle(server, model)
    assert resumed == [0] * len(types) + [len(prompt) - 1] * len(types)


def test_rows_that_are_rounded_already_are_not_rounded_again(
    binary: Path, models: Path, tmp_path: Path, sidecar: Sidecar
) -> None:
    env = {
        "OLLAMA_FLASH_ATTENTION": 1,
        "OLLAMA_KV_CACHE_TYPE": "q8_0",
        "OLLAMA_KV_TIER_ENCODING": "q8_0",
    }
    with Server(binary, tmp_path / "tested", models, socket=sidecar.socket, env=env) as server:
        for model in MODELS:
            server.generate(model, text(300, model))
            pid = server.runner_pid(model)
            report = wait_until(
                "the reason is reported", lambda pid=pid: (r := sidecar.report(pid)).pid and r
            )
            assert "OLLAMA_KV_TIER_ENCODING" in report.reason
    assert sidecar.stat().put_blocks == 0
