"""What a llama-server was started with is read from its command, however it is written."""

from __future__ import annotations

import os

import pytest

from ollama_tiering.sidecar.runner_settings import settings_in, settings_of
from ollama_tiering.store.block.pb import block_store_pb2 as pb


@pytest.mark.parametrize(
    ("command", "numbers"),
    [
        ("llama-server --model m -c 8192 -np 2 --port 1", (4096, 2, 0, 0)),
        ("llama-server --ctx-size 4096 --parallel 1 -b 512 -t 8", (4096, 1, 512, 8)),
        ("llama-server -t 4 --batch-size 1024 --threads 6", (0, 0, 1024, 6)),
        ("llama-server -c", (0, 0, 0, 0)),
        ("llama-server -c many -np 0 -b -1", (0, 0, 0, 0)),
        ("llama-server -c 99999999999999999999", ((1 << 32) - 1, 0, 0, 0)),
        ("ollama runner --model m", (0, 0, 0, 0)),
        ("", (0, 0, 0, 0)),
    ],
)
def test_settings_are_read_from_the_command(command: str, numbers: tuple[int, ...]) -> None:
    context, slots, batch, threads = numbers
    assert settings_in(command.split()) == pb.RunnerSettings(
        context_tokens=context, slots=slots, batch_tokens=batch, threads=threads
    )


def test_of_a_process_that_is_gone_or_another_program_nothing_is_known() -> None:
    assert settings_of(1 << 22) == pb.RunnerSettings()
    assert settings_of(os.getpid()).context_tokens == 0
