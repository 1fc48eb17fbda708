"""The clients `ollama` and `openai` from PyPI, streaming a conversation over restores.

Chat templates put tokens between the turns that no client sees; a restored prefix ends where the
next turn begins all the same.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import ollama
import openai
import pytest

from tests.engine.harness import BLOCK_TOKENS, Server, Sidecar, text

TURNS = 4
QUESTIONS = [text(100, ("question", turn)) for turn in range(TURNS)]
Messages = list[dict[str, str]]
Ask = Callable[[str, Messages], str]


def ask_ollama(url: str, messages: Messages) -> str:
    client = ollama.Client(host=url, trust_env=False)
    options = {"temperature": 0, "seed": 1, "num_predict": 16}
    stream = client.chat("chat", messages, stream=True, options=options)
    parts = [part.message.content or "" for part in stream]
    client.close()  # type: ignore[no-untyped-call]
    assert len(parts) > 2, "not streamed"
    return "".join(parts)


def ask_openai(url: str, messages: Messages) -> str:
    with openai.OpenAI(base_url=url + "/v1", api_key="none", max_retries=0) as client:
        stream: Any = client.chat.completions.create(
            model="chat",
            messages=messages,  # type: ignore[arg-type]
            stream=True,
            temperature=0,
            seed=1,
            max_tokens=16,
        )
        parts = [part.choices[0].delta.content or "" for part in stream if part.choices]
    assert len(parts) > 2, "not streamed"
    return "".join(parts)


def conversation(
    server: Server, ask: Ask, between: Callable[[], None]
) -> tuple[Messages, list[int]]:
    """All messages, and from which position each turn was computed."""
    messages: Messages = [{"role": "system", "content": text(120, "system")}]
    before = len(server.loads())
    for question in QUESTIONS:
        messages.append({"role": "user", "content": question})
        messages.append({"role": "assistant", "content": ask(server.url, messages)})
        between()
    return messages, [load.used for load in server.loads()[before:]]


@pytest.mark.parametrize("ask", [ask_ollama, ask_openai], ids=["ollama", "openai"])
def test_client_streams_the_same_conversation_when_every_turn_is_restored(
    binary: Path, models: Path, tmp_path: Path, sidecar: Sidecar, ask: Ask
) -> None:
    with Server(binary, tmp_path / "reference", models) as reference:
        expected = conversation(reference, ask, lambda: None)
    with Server(binary, tmp_path / "tested", models, socket=sidecar.socket) as server:
        assert conversation(server, ask, lambda: server.unload("chat")) == expected
        restored = [restore.tokens for restore in server.restores()]
    assert restored == expected[1][1:]
    assert min(restored) > BLOCK_TOKENS
