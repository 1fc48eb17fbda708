"""Which request a prompt to be warmed becomes, and what is refused."""

from __future__ import annotations

import json
from typing import Any

import pytest

from ollama_tiering.errors import UsageError
from ollama_tiering.warm.prompt import checked, of_parts, of_request, options_of

TOOLS = [{"type": "function", "function": {"name": "light", "parameters": {}}}]


def test_system_and_tools_are_a_chat_as_a_client_sends_it() -> None:
    prompt = of_parts("m", system="You are", tools=json.dumps(TOOLS), options={"num_ctx": 4096})
    assert prompt.path == "/api/chat"
    assert prompt.request == {
        "model": "m",
        "messages": [
            {"role": "system", "content": "You are"},
            {"role": "user", "content": "."},
        ],
        "tools": TOOLS,
        "options": {"num_ctx": 4096, "num_predict": 1},
        "stream": False,
    }
    assert "num_predict" not in prompt.body["options"], "the kept prompt is changed"


def test_a_text_is_what_the_user_says() -> None:
    assert of_parts("m", text="Read this").request["messages"] == [
        {"role": "user", "content": "Read this"}
    ]


def test_a_captured_request_is_sent_as_it_is_but_for_one_token() -> None:
    body = {
        "model": "theirs",
        "prompt": "once",
        "system": "s",
        "stream": True,
        "keep_alive": "1h",
        "options": {"num_ctx": 2048, "num_predict": 500},
    }
    prompt = of_request(json.dumps(body), "", {})
    assert prompt.path == "/api/generate"
    options = {"num_ctx": 2048, "num_predict": 1}
    assert prompt.request == {**body, "stream": False, "options": options}
    other = of_request(json.dumps(body), "mine", {"num_ctx": 1024})
    assert (other.model, other.request["options"]["num_ctx"]) == ("mine", 1024)


@pytest.mark.parametrize(
    "body",
    [
        {"messages": [{"role": "user", "content": "x"}]},
        {"model": "", "prompt": "x"},
        {"model": 3, "prompt": "x"},
        {"model": "m"},
        {"model": "m", "messages": []},
        {"model": "m", "messages": "x"},
        {"model": "m", "prompt": ""},
        {"model": "m", "prompt": ["x"]},
        {"model": "m", "prompt": "x", "options": []},
    ],
)
def test_what_is_no_request_is_refused(body: dict[str, Any]) -> None:
    with pytest.raises(UsageError):
        checked(body)
    with pytest.raises(UsageError):
        of_request(json.dumps(body), "")


@pytest.mark.parametrize("text", ["", "{", "[]", '"x"', "null"])
def test_a_file_that_is_no_request_is_refused(text: str) -> None:
    with pytest.raises(UsageError, match="--request"):
        of_request(text, "m")


@pytest.mark.parametrize("tools", ["{", "{}", "3"])
def test_tools_are_a_list(tools: str) -> None:
    with pytest.raises(UsageError, match="--tools"):
        of_parts("m", tools=tools)


def test_nothing_to_compute_is_refused() -> None:
    with pytest.raises(UsageError, match="no prompt"):
        of_parts("m")


def test_options_are_numbers_words_and_lists() -> None:
    assert options_of(("num_ctx=8192", "stop=[1]", "x=on", "y=a=b")) == {
        "num_ctx": 8192,
        "stop": [1],
        "x": "on",
        "y": "a=b",
    }
    for wrong in ("num_ctx", "=3"):
        with pytest.raises(UsageError, match="NAME=VALUE"):
            options_of((wrong,))
