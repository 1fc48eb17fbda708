"""What clients see: answers are stock's, and say how many tokens of the prompt were found.

Chat templates put tokens between the turns that no client sees; a restored prefix ends where the
next turn begins all the same.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest

from tests.engine.client_apis import APIS, Api, Message, Turn, ask, assert_as_stocks, sse_data
from tests.engine.harness import BLOCK_TOKENS, Server, Sidecar, text
from tests.engine.test_restore import LookupTooSlow, until_heard

TURNS, UNLOADED, RESTARTED = 6, 2, 4  # before these turns; all others go on in memory


def conversation(
    server: Server, api: Api, stream: bool, seed: object, before: Mapping[int, Callable[[], None]]
) -> list[Turn]:
    """All turns; `before` has what is done to the server before some of them."""
    messages: list[Message] = [{"role": "system", "content": text(120, ("system", seed))}]
    turns = []
    for number in range(TURNS):
        before.get(number, lambda: None)()
        messages.append({"role": "user", "content": text(80, ("question", number, seed))})
        turns.append(ask(server, api, messages, stream))
        messages.append({"role": "assistant", "content": turns[-1].answer.text})
    return turns


# Every API, streamed or whole by turns; the rest is slow.
APIS_BY_TURNS = [
    pytest.param(
        name,
        stream,
        id=f"{name}-{'streamed' if stream else 'whole'}",
        marks=() if stream == (number % 2 == 0) else pytest.mark.slow,
    )
    for number, name in enumerate(APIS)
    for stream in (True, False)
]


@pytest.mark.parametrize(("name", "stream"), APIS_BY_TURNS)
def test_a_conversation_survives_a_restart_and_says_what_was_found(
    stock: Server,
    binary: Path,
    models: Path,
    tmp_path: Path,
    sidecar: Sidecar,
    name: str,
    stream: bool,
) -> None:
    def converse(attempt: int) -> None:
        stock.unload("chat")
        expected = conversation(stock, APIS[name], stream, attempt, {})
        with Server(binary, tmp_path / str(attempt), models, socket=sidecar.socket) as server:
            interruptions = {UNLOADED: lambda: server.unload("chat"), RESTARTED: server.restart}
            turns = conversation(server, APIS[name], stream, attempt, interruptions)
            assert_as_stocks(server, turns, expected)
            restored = [restore.tokens for restore in server.restores()]
        assert turns[0].answer.cached == 0
        assert restored == [turns[UNLOADED].answer.cached, turns[RESTARTED].answer.cached]
        assert min(restored) > BLOCK_TOKENS

    until_heard(converse)


@pytest.mark.parametrize("model", ["g2", "llama"])
def test_tokens_in_memory_and_restored_ones_are_counted_together(
    binary: Path, models: Path, tmp_path: Path, sidecar: Sidecar, model: str
) -> None:
    """On both engines."""

    def count(attempt: int) -> None:
        prompt = text(600, ("counted", attempt))
        other = prompt[:200] + text(300, ("other", attempt))
        with Server(binary, tmp_path / str(attempt), models, socket=sidecar.socket) as server:
            answers = []
            for asked in (prompt, prompt, other, prompt):
                answers.append(server.generate(model, asked))
                sidecar.settle(server, model)
            found = [answer.cached for answer in answers]
            assert found == [answer.resumed for answer in answers]
            if found[-1] == 200 and server.pauses():
                raise LookupTooSlow
            assert found == [0, 599, 200, 599]
            assert [answer.prompt_tokens for answer in answers] == [600, 600, 500, 600]
            (restore,) = server.restores()
        # Of stock's attention whole blocks only: the others may have been computed otherwise.
        assert (restore.first, restore.tokens) == (192, 407)

    until_heard(count)


# --- key for key ----------------------------------------------------------------------------------

OPTIONS = {"temperature": 0, "seed": 1, "num_predict": 8}
LIMIT = {"temperature": 0, "max_tokens": 8}
NATIVE = {"prompt_eval_cached_count"}
USAGE = {"usage.prompt_tokens_details", "usage.prompt_tokens_details.cached_tokens"}
# path -> how a prompt is put, what else is asked, keys that only the tested server's answers have
REQUESTS: dict[str, tuple[str, dict[str, Any], set[str]]] = {
    "/api/generate": ("prompt", {"options": OPTIONS}, NATIVE),
    "/api/chat": ("messages", {"options": OPTIONS}, NATIVE),
    "/v1/chat/completions": ("messages", LIMIT, USAGE),
    "/v1/completions": ("prompt", LIMIT, USAGE),
    "/v1/responses": ("input", {"temperature": 0, "max_output_tokens": 8}, set()),
    "/v1/messages": ("messages", LIMIT, {"usage.cache_read_input_tokens"}),
}
OTHER_EACH_TIME = re.compile(r".*(id|created|created_at|completed_at|_duration)")


def documents(server: Server, path: str, stream: bool) -> list[dict[str, Any]]:
    """What is answered to a prompt, and to the same prompt again."""
    where, more, _ = REQUESTS[path]
    prompt: Any = text(150, (path, stream))
    if where == "messages":
        prompt = [{"role": "user", "content": prompt}]
    body = {"model": "chat", where: prompt, "stream": stream} | more
    if stream and "completions" in path:
        body["stream_options"] = {"include_usage": True}
    found = []
    for _ in range(2):
        answer = server.http.post(server.url + path, json=body).raise_for_status()
        events = "text/event-stream" in answer.headers["content-type"]
        found += sse_data(answer.text) if events else answer.text.splitlines()
    return [json.loads(one) for one in found]


def lasting(value: Any) -> Any:
    """Without what no two answers have in common."""
    if isinstance(value, list):
        return [lasting(one) for one in value]
    if not isinstance(value, dict):
        return value
    return {
        key: type(one).__name__ if OTHER_EACH_TIME.fullmatch(key) else lasting(one)
        for key, one in value.items()
    }


def keys(value: Any, path: str = "") -> set[str]:
    if isinstance(value, list):
        return set().union(*(keys(one, path) for one in value))
    if not isinstance(value, dict):
        return set()
    own = {path + key for key in value}
    return own.union(*(keys(one, f"{path}{key}.") for key, one in value.items()))


def test_answers_are_stocks_byte_for_byte_or_have_the_counts_besides(
    stock: Server, binary: Path, models: Path, tmp_path: Path, sidecar: Sidecar
) -> None:
    """The order of keys counts, too. Numbers that differ each time are compared by their type."""
    cases = [(path, stream) for path in REQUESTS for stream in (False, True)]
    stock.unload("chat")
    expected = {case: documents(stock, *case) for case in cases}
    with Server(binary, tmp_path / "off", models) as server:
        for case in cases:
            got = documents(server, *case)
            assert json.dumps(lasting(got)) == json.dumps(lasting(expected[case])), case
    with Server(binary, tmp_path / "on", models, socket=sidecar.socket) as server:
        for path, stream in cases:
            mine, theirs = keys(documents(server, path, stream)), keys(expected[path, stream])
            assert mine - theirs == REQUESTS[path][2], (path, stream)
            assert theirs - mine == set(), (path, stream)
