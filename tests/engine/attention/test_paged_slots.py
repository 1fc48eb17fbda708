"""Paged K/V with several slots, with clients that hang up, and with tiers, on a GPU that is not
there (tests/attention/fakegpu), whose streams are late by chance.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.engine.attention import paged
from tests.engine.attention.fake_gpu import devices
from tests.engine.attention.paged import BOTH_LATE, PROMPT_TOKENS
from tests.engine.harness import Server, Sidecar, assert_same, text
from tests.engine.namespaces import descriptions, only_parts
from tests.engine.test_alternate import differing_in_turn
from tests.engine.test_replay import assert_nothing_wrong, environment, make_prompts, replay, storm
from tests.engine.test_restore import LookupTooSlow, until_heard

LAYERS = 8


@pytest.mark.parametrize("multiuser", [pytest.param(0, marks=pytest.mark.slow), 1])
@pytest.mark.timeout(400)
def test_under_four_clients_that_hang_up_every_row_is_what_one_at_a_time_would_write(
    replay_binary: Path,
    paged_binary: Path,
    models: Path,
    tmp_path: Path,
    sidecar: Sidecar,
    multiuser: int,
) -> None:
    """Forks, too, with several users. All is done again, one batch at a time, and compared."""
    binary = paged.with_program(paged_binary, replay_binary, tmp_path / "ollama")
    env = environment(multiuser, 1, "5ms") | paged.hot(1) | {"OLLAMA_NUM_PARALLEL": 4}
    env |= devices(1024, **BOTH_LATE)
    with Server(binary, tmp_path / "server", models, socket=sidecar.socket, env=env) as server:
        storm(server, make_prompts(16), 24, seed=16)
        assert paged.kv_bytes(server)["Pinned"] > 0
        assert_nothing_wrong(replay(server), tiered=True)


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_prompts_that_take_turns_without_a_pause_get_their_in_memory_answers(
    paged_binary: Path, models: Path, tmp_path: Path, sidecar: Sidecar
) -> None:
    """A batch that was built ahead may still wait in the device's stream when it has returned."""
    env = paged.hot(3) | devices(1024, DELAY_US=20000, SEED=7)
    assert differing_in_turn(paged_binary, models, tmp_path, sidecar, 1, 8, env) == []


@pytest.mark.parametrize("hot", [LAYERS, pytest.param(3, marks=pytest.mark.slow), 0])
@pytest.mark.timeout(300)
def test_rows_of_paged_layers_come_back_wherever_they_lay(
    paged_binary: Path, models: Path, eight: str, tmp_path: Path, sidecar: Sidecar, hot: int
) -> None:
    """Stored with K/V here and restored there, and the other way round: all names are the same."""

    def check(attempt: int) -> None:
        prompt = text(PROMPT_TOKENS, ("tiers", hot, attempt))
        answers = []
        for number, layers in enumerate((hot, LAYERS - hot)):
            env = paged.hot(layers) | devices(1024, **BOTH_LATE)
            folder = tmp_path / f"{attempt}-{number}"
            with Server(paged_binary, folder, models, socket=sidecar.socket, env=env) as server:
                pauses = server.pauses()
                first = server.generate(eight, prompt)
                restored = sum(restore.tokens for restore in server.restores())
                if number and restored == 0 and server.pauses() > pauses:
                    raise LookupTooSlow
                answers.append(server.generate(eight, prompt) if number == 0 else first)
                assert restored == number * (PROMPT_TOKENS - 1)
                sidecar.settle(server, eight)
        assert_same(answers[1], answers[0])

    until_heard(check)
    assert len(descriptions(sidecar)) == 1


@pytest.mark.timeout(300)
def test_rows_that_are_paged_are_not_stored_before_the_device_has_written_them(
    paged_binary: Path, models: Path, tmp_path: Path, sidecar: Sidecar
) -> None:
    """A long prompt is stored while it is computed, where that is possible. Paged rows lie in
    memory of the host, but a batch without outputs returns before they are written.
    """
    env = paged.hot(0) | {"OLLAMA_KV_TIER_PROGRESS_SECONDS": "0.2"}
    env |= devices(1024, DELAY_US=100000, SEED=7)
    options = {"num_batch": 128}

    def check(attempt: int) -> None:
        prompt, folder = text(1500, ("early", attempt)), tmp_path / str(attempt)
        with Server(paged_binary, folder, models, socket=sidecar.socket, env=env) as server:
            server.generate("g2", prompt, predict=1, **options)
            sidecar.settle(server, "g2")
            hit = server.generate("g2", prompt, predict=4, **options)
            server.restart()
            pauses = server.pauses()
            answer = server.generate("g2", prompt, predict=4, **options)
            restored = sum(restore.tokens for restore in server.restores())
            if restored == 0 and server.pauses() > pauses:
                raise LookupTooSlow
            assert restored == len(prompt) - 1
            assert_same(answer, hit)

    until_heard(check)
    assert only_parts(sidecar)["rows"] == "0000"
