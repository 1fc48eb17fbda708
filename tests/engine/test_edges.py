"""What happens at the edges: full contexts, other settings, cut answers, kills in between.

As in test_restore.py every answer is compared, bit for bit, with one that a server without tiering
gives when its memory holds as many tokens of the prompt.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from tests.engine.harness import (
    BLOCK_TOKENS,
    Result,
    Server,
    Sidecar,
    assert_same,
    in_memory,
    text,
    wait_until,
)
from tests.engine.shifts import across_a_shift
from tests.places import short_directory

TOKENS = 300


@dataclass
class Rig:
    sidecar: Sidecar
    server: Server
    reference: Server
    start: Callable[..., Server]

    def store(self, prompt: str, **options: Any) -> Result:
        """Leaves the prompt and its answer in the store, and nothing in memory."""
        answer = self.server.generate("g2", prompt, **options)
        self.sidecar.settle(self.server, "g2")
        self.server.unload("g2")
        return answer

    def check(self, prompt: str, **options: Any) -> Result:
        """The answer, which is that from memory at wherever it was resumed."""
        answer = self.server.generate("g2", prompt, **options)
        assert_same(answer, in_memory(self.reference, "g2", prompt, answer.resumed, **options))
        return answer


@pytest.fixture(scope="module")
def rig(binary: Path, models: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Rig]:
    folder = tmp_path_factory.mktemp("edges")

    def start(name: str, sidecar: Sidecar | None, **env: Any) -> Server:
        socket = sidecar.socket if sidecar else None
        env = {"OLLAMA_FLASH_ATTENTION": 1} | env
        return Server(binary, folder / name, models, socket=socket, env=env)

    with (
        short_directory(in_memory=True) as fast,
        Sidecar(folder / "sidecar", fast) as sidecar,
        start("tested", sidecar) as server,
        start("reference", None) as reference,
    ):
        yield Rig(sidecar, server, reference, start)


@pytest.mark.parametrize("tokens", [1023, 1024, 1500])
def test_a_prompt_that_fills_the_context_is_restored(rig: Rig, tokens: int) -> None:
    """What was exact is stored before the full context is shifted; memory itself loses it then."""
    context, keep = 1024, 4
    prompt = text(tokens, ("fills", tokens))
    seen = prompt if tokens <= context else prompt[:keep] + prompt[keep - context :]
    expected = across_a_shift(rig.reference, "g2", prompt, before=seen[:-1], num_ctx=context)
    assert expected.resumed == len(seen) - 1
    rig.store(prompt, num_ctx=context, predict=1)
    answer = rig.server.generate("g2", prompt, num_ctx=context)
    assert_same(answer, expected)


def test_another_context_size_restores_the_same_rows(rig: Rig) -> None:
    prompt = text(TOKENS, "context size")
    rig.store(prompt, num_ctx=1024)
    assert rig.check(prompt, num_ctx=4096).resumed == TOKENS - 1


def test_an_answer_cut_at_a_stop_string_is_continued_where_memory_would(rig: Rig) -> None:
    prompt = text(TOKENS, "stop")
    whole = rig.reference.generate("g2", prompt).text
    stop = whole[7:10]
    rig.reference.generate("g2", text(TOKENS, "displaces"))
    cut = rig.reference.generate("g2", prompt, stop=[stop])
    assert cut.text == whole[: whole.index(stop)]
    turn = prompt + whole + text(30, "turn")
    expected = rig.reference.generate("g2", turn)
    rig.store(prompt, stop=[stop])
    assert_same(rig.server.generate("g2", turn), expected)


def test_rows_of_another_attention_are_not_used(rig: Rig) -> None:
    prompt = text(TOKENS, "attention")
    rig.store(prompt)
    with (
        rig.start("without", rig.sidecar, OLLAMA_FLASH_ATTENTION=0) as server,
        rig.start("reference without", None, OLLAMA_FLASH_ATTENTION=0) as reference,
    ):
        answer = server.generate("g2", prompt)
        assert answer.resumed == 0
        assert_same(answer, reference.generate("g2", prompt))


def test_rows_of_another_model_are_not_used(rig: Rig) -> None:
    prompt = text(TOKENS, "model")
    rig.store(prompt)
    answer = rig.server.generate("g5", prompt)
    assert answer.resumed == 0
    assert_same(answer, rig.reference.generate("g5", prompt))


def test_another_server_restores_what_this_one_stored(rig: Rig) -> None:
    prompt = text(TOKENS, "another server")
    rig.store(prompt)
    expected = in_memory(rig.reference, "g2", prompt, TOKENS - 1)
    with rig.start("second", rig.sidecar) as second:
        assert_same(second.generate("g2", prompt), expected)


def test_short_prompts_are_neither_stored_nor_restored(rig: Rig) -> None:
    before = rig.sidecar.stat().put_blocks
    prompt = text(BLOCK_TOKENS - 20, "short")
    rig.store(prompt, predict=4)
    assert rig.sidecar.stat().put_blocks == before
    assert rig.check(prompt, predict=4).resumed == 0


def test_gate_recompute_stores_and_does_not_restore(rig: Rig) -> None:
    prompt = text(TOKENS, "gate")
    with rig.start("recompute", rig.sidecar, OLLAMA_KV_TIER_GATE="recompute") as server:
        server.generate("g2", prompt)
        rig.sidecar.settle(server, "g2")
        server.unload("g2")
        answer = server.generate("g2", prompt)
        assert answer.resumed == 0
        assert_same(answer, in_memory(rig.reference, "g2", prompt, 0))
    assert rig.check(prompt).resumed == TOKENS - 1


def test_snapshot_off_restores_and_does_not_store(rig: Rig) -> None:
    prompt, other = text(TOKENS, "stored"), text(TOKENS, "not stored")
    rig.store(prompt)
    with rig.start("restores only", rig.sidecar, OLLAMA_KV_TIER_SNAPSHOT="0") as server:
        expected = in_memory(rig.reference, "g2", prompt, TOKENS - 1)
        assert_same(server.generate("g2", prompt), expected)
        server.generate("g2", other)
        server.unload("g2")
        assert server.generate("g2", other).resumed == 0


@pytest.mark.parametrize(
    "delay_ms",
    [0, pytest.param(1, marks=pytest.mark.slow), 3, pytest.param(6, marks=pytest.mark.slow), 12],
)
def test_runner_killed_while_it_stores_leaves_nothing_wrong(rig: Rig, delay_ms: int) -> None:
    prompt = text(1500, ("killed", delay_ms))
    rig.server.generate("g2", prompt)
    time.sleep(delay_ms / 1000)
    rig.server.kill_runner("g2")
    rig.check(prompt)


def test_a_long_prompt_is_kept_when_the_runner_is_killed_in_the_middle(rig: Rig) -> None:
    prompt = text(1500, "long")
    with (
        rig.start("stores early", rig.sidecar, OLLAMA_KV_TIER_PROGRESS_SECONDS="0") as server,
        ThreadPoolExecutor(1) as pool,
    ):
        server.generate("slow", text(100, "first"))  # until then its file may not be checked
        rig.sidecar.settle(server, "slow")
        before = rig.sidecar.stat().put_blocks
        broken = pool.submit(server.generate, "slow", prompt)
        wait_until(
            "the first batch of three is stored",
            lambda: rig.sidecar.stat().put_blocks >= before + 512 // BLOCK_TOKENS,
        )
        assert not broken.done(), "the prompt was computed before anything was stored"
        server.kill_runner("slow")
        assert isinstance(broken.exception(), AssertionError)
    answer = rig.server.generate("slow", prompt)
    assert answer.resumed in (512, 1024)
    assert_same(answer, in_memory(rig.reference, "slow", prompt, answer.resumed))
