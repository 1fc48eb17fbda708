"""A prompt that is looked up counts once, however many questions its engine asks for it."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from ollama_tiering.client.admin_client import SidecarAdministration
from ollama_tiering.protocol.engine import messages as m
from ollama_tiering.protocol.pb import administration_pb2 as adm
from ollama_tiering.store.block.key import tokens_to_bytes
from ollama_tiering.store.values import Selection
from tests.contract.fake_engine import FakeEngine, prompt
from tests.sidecar import SidecarProcess

BLOCKS = 20  # more than are opened within a look-up
TOKENS = prompt(61_000, 64 * BLOCKS)
ASKED = m.EngineMatch(tokens_to_bytes(TOKENS))


@pytest.fixture
def counted(tmp_path: Path) -> Iterator[SidecarProcess]:
    """A sidecar that has the prompt and, started anew, remembers nothing of its files."""
    with SidecarProcess(tmp_path) as daemon:
        with FakeEngine(daemon.socket) as engine:
            engine.store(TOKENS)
        daemon.stop()
        daemon.start()
        yield daemon


def counts(daemon: SidecarProcess) -> tuple[int, int, int, int]:
    stat: adm.StatResponse = daemon.stat()
    with SidecarAdministration(daemon.socket) as admin:
        (chain,) = admin.listing(Selection()).chains
    return stat.has_calls, stat.asked_tokens, stat.matched_tokens, chain.hits


def test_a_look_up_that_had_to_wait_counts_once(counted: SidecarProcess) -> None:
    before = counts(counted)
    with FakeEngine(counted.socket) as first, FakeEngine(counted.socket) as waiting:
        found = first.client.match(ASKED)  # as llama-server's library does it
        assert found.pending
        first.client.release(found.lease_id)
        found = waiting.client.match(ASKED)
        assert found.pending
        assert len(waiting.client.wait(found.lease_id).files) == BLOCKS
        waiting.client.wait(found.lease_id)  # longer, please
        waiting.client.release(found.lease_id)
        after = counts(counted)
    grown = [new - old for old, new in zip(before, after, strict=True)]
    assert grown == [1, len(TOKENS), len(TOKENS), 1]


def test_one_that_is_answered_at_once_counts_once_and_so_does_each_of_several(
    counted: SidecarProcess,
) -> None:
    with FakeEngine(counted.socket) as engine:
        engine.look_up(TOKENS)
        before = counts(counted)
        for number in (1, 2):
            found = engine.client.match(ASKED)
            assert not found.pending
            engine.client.release(found.lease_id)
            after = counts(counted)
            assert after[0] - before[0] == number
            assert after[3] - before[3] == number
        engine.look_up(prompt(62_000, 640))
        assert counted.stat().has_calls == before[0] + 3, "what is not stored, too"
        assert counted.stat().misses["unknown prefix"] == 1
