"""K/V of devices comes back bit for bit, on GPUs that are not there (`tests/attention/fakegpu`).

Their streams are late by chance: what is copied before a device has written it is copied wrong, and
what a device has yet to write is written over what was restored.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.engine.attention.fake_gpu import NO_DEVICE, devices, offloaded
from tests.engine.harness import Result, Server, Sidecar, assert_same, text
from tests.engine.namespaces import descriptions, parts
from tests.engine.test_alternate import differing_in_turn
from tests.engine.test_restore import LookupTooSlow, until_heard

PROMPT_TOKENS = 700
FLASH = {"OLLAMA_FLASH_ATTENTION": "1"}
LATE = {"DELAY_US": 20000, "SEED": 7}  # a token of an answer is two or three jobs


def _answer(server: Server, model: str, prompt: str, **options: Any) -> tuple[Result, int]:
    """The answer, and how many of the prompt's rows were restored for it."""
    before, pauses = len(server.restores()), server.pauses()
    answer = server.generate(model, prompt, **options)
    restored = sum(restore.tokens for restore in server.restores()[before:])
    if restored == 0 and server.pauses() > pauses:
        raise LookupTooSlow
    return answer, restored


def _from_memory(server: Server, model: str, prompt: str, **options: Any) -> Result:
    """Computes the prompt; the answer when all but its last token is in memory."""
    _answer(server, model, prompt, **options | {"predict": 1})
    hit, _ = _answer(server, model, prompt, **options)
    assert hit.resumed == len(prompt) - 1
    return hit


def _rows(sidecar: Sidecar) -> set[str]:
    """Who computes which layer, of every namespace."""
    named = [parts(description) for description in descriptions(sidecar)]
    assert {one["keys"] for one in named} == {"rows"}  # tokens do not decide a device's rows
    return {one["rows"] for one in named}


def _pinned(log: Path) -> int:
    """Pieces of pinned memory that rows are read into on their way to a device (copy.go)."""
    return log.read_text().count(f"pinned: {4 << 20} bytes")


@pytest.mark.parametrize(
    ("model", "env", "options", "rows"),
    [
        ("g2", devices(1024, **LATE), {}, "0000"),
        ("g2", devices(1024, **LATE), {"num_gpu": 2}, "hh00"),
        ("g2", devices(1024, 1024, **LATE) | {"OLLAMA_SCHED_SPREAD": "1"}, {}, "0000"),
        ("g2", devices(1024, **LATE) | {"OLLAMA_KV_CACHE_TYPE": "q8_0"}, {}, "0000"),
        ("g2", devices(1024, HOST_VISIBLE=1, **LATE), {}, "0000"),
        ("llama", devices(1024, **LATE), {}, "0000"),
    ],
    ids=["all layers", "some layers", "two devices", "q8_0", "memory of the host", "llama.cpp"],
)
@pytest.mark.timeout(300)
def test_rows_of_a_device_come_back_after_an_unload_and_after_restarts(
    gpu_binary: Path,
    models: Path,
    tmp_path: Path,
    sidecar: Sidecar,
    model: str,
    env: dict[str, str],
    options: dict[str, Any],
    rows: str,
) -> None:
    def check(attempt: int) -> None:
        prompt = text(PROMPT_TOKENS, (model, attempt))
        folder = tmp_path / str(attempt)
        log = tmp_path / f"{attempt}.log"
        given = FLASH | env | {"FAKEGPU_LOG": str(log)}
        with Server(gpu_binary, folder, models, socket=sidecar.socket, env=given) as server:
            hit = _from_memory(server, model, prompt, **options)
            assert offloaded(server)[0] > 0
            sidecar.settle(server, model)
            assert _pinned(log) == 0
            for restart in (False, True):
                server.unload(model)
                if restart:
                    server.stop()
                    sidecar.restart()
                    server.start()
                answer, restored = _answer(server, model, prompt, **options)
                assert restored == PROMPT_TOKENS - 1
                assert_same(answer, hit, restart)
            assert _pinned(log) >= 2  # by both runners that restored
        assert _rows(sidecar) == {rows}

    until_heard(check)


@pytest.mark.timeout(300)
def test_prompts_that_take_turns_without_a_pause_get_their_in_memory_answers(
    gpu_binary: Path, models: Path, tmp_path: Path, sidecar: Sidecar
) -> None:
    """The batch that was built ahead may still wait in the device's stream when it has returned."""
    late = devices(1024, **LATE)
    assert differing_in_turn(gpu_binary, models, tmp_path, sidecar, 1, 8, late) == []


@pytest.mark.timeout(300)
def test_rows_in_memory_of_the_host_are_not_read_before_the_device_has_written_them(
    gpu_binary: Path, models: Path, tmp_path: Path, sidecar: Sidecar
) -> None:
    """A long prompt is stored while it is computed, where that is possible. On a device a batch
    without outputs returns before it is computed, whatever memory its rows will lie in.
    """
    env = FLASH | {"OLLAMA_KV_TIER_PROGRESS_SECONDS": "0.2"}
    env |= devices(1024, HOST_VISIBLE=1, DELAY_US=400000, SEED=7)
    options = {"num_batch": 128}

    def check(attempt: int) -> None:
        prompt, folder = text(1500, ("early", attempt)), tmp_path / str(attempt)
        with Server(gpu_binary, folder, models, socket=sidecar.socket, env=env) as server:
            _answer(server, "g2", prompt, predict=1, **options)
            sidecar.settle(server, "g2")
            hit, restored = _answer(server, "g2", prompt, predict=4, **options)
            assert restored == 0
            server.restart()
            answer, restored = _answer(server, "g2", prompt, predict=4, **options)
            assert restored == len(prompt) - 1
            assert_same(answer, hit)

    until_heard(check)


@pytest.mark.timeout(300)
def test_what_one_device_computed_is_found_wherever_it_lies(
    gpu_binary: Path, models: Path, tmp_path: Path, sidecar: Sidecar
) -> None:
    """Its own memory or the host's, more of it or less, a longer context, two of its kind. What the
    CPU computes of it has other last bits on a real GPU.
    """
    spread = {"OLLAMA_SCHED_SPREAD": "1"}
    whole = [
        (devices(1024), {"num_ctx": 2048}),
        (devices(1024, HOST_VISIBLE=1), {"num_ctx": 2048}),
        (devices(1536), {"num_ctx": 8192}),
        (devices(1024, 1024) | spread, {"num_ctx": 2048}),
    ]
    partly = [(devices(1024), {"num_gpu": 2}), (devices(1024) | NO_DEVICE, {})]

    def check(attempt: int) -> None:
        prompt = text(PROMPT_TOKENS, ("lies", attempt))
        found: list[tuple[Result, int]] = []
        for number, (env, options) in enumerate(whole + partly):
            folder = tmp_path / f"{attempt}-{number}"
            with Server(
                gpu_binary, folder, models, socket=sidecar.socket, env=FLASH | env
            ) as server:
                _, restored = _answer(server, "g2", prompt, predict=1, **options)
                found.append((_answer(server, "g2", prompt, **options)[0], restored))
                sidecar.settle(server, "g2")
        all_but_one = PROMPT_TOKENS - 1
        assert [restored for _, restored in found] == [0, *[all_but_one] * 3, 0, 0]
        for number, (answer, _) in enumerate(found):
            assert_same(answer, found[0][0], number)

    until_heard(check)
    assert _rows(sidecar) == {"0000", "hh00", "hhhh"}
