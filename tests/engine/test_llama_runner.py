"""What the llama.cpp runner has of its own: quantised caches, shifts that touch every slot, models
that it refuses. That its restores are in-memory hits bit for bit is test_restore.py's business.
"""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from tests.engine.conftest import make_fast
from tests.engine.harness import (
    BLOCK_TOKENS,
    Server,
    Sidecar,
    assert_same,
    in_memory,
    text,
    wait_until,
)
from tests.engine.test_restore import EXCHANGES, LookupTooSlow, Rig, until_heard

MODEL = "llama"
SHIFT = "context limit hit - shifting"


@pytest.fixture(scope="module")
def rig(
    request: pytest.FixtureRequest,
    binary: Path,
    models: Path,
    tmp_path_factory: pytest.TempPathFactory,
) -> Iterator[Rig]:
    """request.param: type of the cache, slots."""
    cache_type, slots = request.param
    folder, fast = tmp_path_factory.mktemp("llama"), make_fast()
    env = {
        "OLLAMA_FLASH_ATTENTION": 1,
        "OLLAMA_KV_CACHE_TYPE": cache_type,
        "OLLAMA_NUM_PARALLEL": slots,
    }
    try:
        with (
            Sidecar(folder / "sidecar", fast) as sidecar,
            Server(binary, folder / "tested", models, socket=sidecar.socket, env=env) as server,
            Server(binary, folder / "reference", models, env=env) as reference,
        ):
            yield Rig(sidecar, server, reference)
    finally:
        shutil.rmtree(fast)


@pytest.mark.parametrize("rig", [("q8_0", 1), ("q4_0", 1)], indirect=True, ids=str)
def test_a_quantised_cache_comes_back_as_it_was(rig: Rig) -> None:
    left = list(EXCHANGES)

    def exchanges(attempt: int) -> None:
        prompts, expected = [], []
        for exchange in left:
            seed = f"{exchange.name} {attempt}"
            prompt, _ = exchange.run(rig.reference, MODEL, seed)
            expected.append(rig.reference.generate(MODEL, prompt, **exchange.options))
            assert exchange.run(rig.server, MODEL, seed)[0] == prompt
            prompts.append(prompt)
        rig.displace(MODEL, attempt)
        rig.server.restart()
        for exchange, prompt, reference in zip(list(left), prompts, expected, strict=True):
            rig.check(exchange.name, reference, MODEL, prompt, **exchange.options)
            left.remove(exchange)

    until_heard(exchanges)


@pytest.mark.parametrize("rig", [("q8_0", 2)], indirect=True, ids=str)
def test_a_shift_rounds_the_rows_of_every_slot_and_none_of_them_is_stored(rig: Rig) -> None:
    """Two conversations are in memory, in a slot each. One of them shifts; the other goes on."""
    context, server = 2048, rig.server

    def shift(attempt: int) -> None:
        prompts = [text(600, (name, attempt)) for name in ("one", "two")]
        loads = len(server.loads())
        with ThreadPoolExecutor(1) as pool:  # the first slot is in use when the second is chosen
            long = server.body(MODEL, prompts[0], predict=200)
            first = pool.submit(server.post, "/api/generate", json=long)
            wait_until("the first slot is in use", lambda: len(server.loads()) > loads)
            server.generate(MODEL, prompts[1])
            first.result()
        slots = [load.slot for load in server.loads()[loads:]]
        assert len(set(slots)) == 2
        shifts = server.log_text().count(SHIFT)
        server.generate(MODEL, text(context - 40, ("shift", attempt)), predict=70)
        assert server.log_text().count(SHIFT) > shifts
        other = prompts[1 - slots.index(server.loads()[-1].slot)]
        longer = other + text(200, ("more", attempt))
        assert server.generate(MODEL, longer).resumed >= len(other)  # in memory, as in stock
        rig.sidecar.settle(server, MODEL)
        server.unload(MODEL)
        answer = server.generate(MODEL, longer)
        # What was there before the shift is back; what was computed on top of rounded rows is not.
        if answer.resumed == 0 and server.pauses():
            raise LookupTooSlow
        assert 0 < answer.resumed < len(longer) - 1 - BLOCK_TOKENS
        assert_same(answer, in_memory(rig.reference, MODEL, longer, answer.resumed))

    until_heard(shift)


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
