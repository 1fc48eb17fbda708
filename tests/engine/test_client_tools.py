"""Tools, offered, called and answered through each API that has them; `ollama run --verbose`."""

from __future__ import annotations

import json
import re
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from tests.engine.client_apis import APIS, Message, Turn, ask, assert_as_stocks
from tests.engine.harness import Server, Sidecar, text
from tests.engine.test_restore import until_heard

TEMPLATE = """\
{{- if .Tools }}<|im_start|>system
{{ range .Tools }}{{ . }}
{{ end }}<|im_end|>
{{ end }}
{{- range .Messages }}<|im_start|>{{ .Role }}
{{ .Content }}
{{- if .ToolCalls }}
{{- range .ToolCalls }}{"name": "{{ .Function.Name }}", "parameters": {{ .Function.Arguments }}}
{{- end }}
{{- end }}<|im_end|>
{{ end }}<|im_start|>assistant
"""
ABOUT: dict[str, Any] = {"name": "weather", "description": "The weather of a city"}
CITY = {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]}
FUNCTION = {"type": "function", "function": ABOUT | {"parameters": CITY}}
CALL, RESULT = '{"city": "Rome"}', text(60, "result")
# What a model with random weights must be made to say.
CALL_SCHEMA = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "enum": ["weather"]},
        "parameters": CITY | {"properties": {"city": {"type": "string", "enum": ["Rome"]}}},
    },
    "required": ["name", "parameters"],
}


class Tools(NamedTuple):
    """How an API is told of the tool, how it is made to call it if it can be, and what it did."""

    offer: dict[str, Any]
    force: dict[str, Any]
    history: list[Message]


TOOLS = {
    "ollama-chat": Tools(
        {"tools": [FUNCTION]},
        {"format": CALL_SCHEMA, "options": {"num_predict": 400}},
        [
            {
                "role": "assistant",
                "tool_calls": [{"function": {"name": "weather", "arguments": json.loads(CALL)}}],
            },
            {"role": "tool", "tool_name": "weather", "content": RESULT},
        ],
    ),
    "openai-chat": Tools(
        {"tools": [FUNCTION]},
        {
            "response_format": {
                "type": "json_schema",
                "json_schema": {"name": "call", "schema": CALL_SCHEMA},
            },
            "max_tokens": 400,
        },
        [
            {
                "role": "assistant",
                "tool_calls": [
                    {
                        "id": "call_1",
                        "type": "function",
                        "function": {"name": "weather", "arguments": CALL},
                    }
                ],
            },
            {"role": "tool", "tool_call_id": "call_1", "content": RESULT},
        ],
    ),
    "openai-responses": Tools(
        {"tools": [ABOUT | {"type": "function", "parameters": CITY, "strict": False}]},
        {},
        [
            {"type": "function_call", "call_id": "call_1", "name": "weather", "arguments": CALL},
            {"type": "function_call_output", "call_id": "call_1", "output": RESULT},
        ],
    ),
    "anthropic-messages": Tools(
        {"tools": [ABOUT | {"input_schema": CITY}]},
        {},
        [
            {
                "role": "assistant",
                "content": [
                    {
                        "type": "tool_use",
                        "id": "toolu_1",
                        "name": "weather",
                        "input": json.loads(CALL),
                    }
                ],
            },
            {
                "role": "user",
                "content": [{"type": "tool_result", "tool_use_id": "toolu_1", "content": RESULT}],
            },
        ],
    ),
}


@pytest.fixture(scope="module")
def made(binary: Path, models: Path, tmp_path_factory: pytest.TempPathFactory) -> None:
    """The models `tools` and `brief`."""
    with Server(binary, tmp_path_factory.mktemp("made"), models) as server:
        for model in ({"model": "tools", "template": TEMPLATE}, {"model": "brief"}):
            parameters = {"num_ctx": 2048, "num_thread": 1, "num_predict": 8}
            request = {"from": "chat", "parameters": parameters, "stream": False}
            server.post("/api/create", json=request | model)


@pytest.mark.usefixtures("made")
@pytest.mark.parametrize("name", TOOLS)
def test_a_tool_is_called_and_its_result_read_after_a_restart(
    stock: Server, binary: Path, models: Path, tmp_path: Path, sidecar: Sidecar, name: str
) -> None:
    tools = TOOLS[name]

    def session(server: Server, seed: object, between: Callable[[], None]) -> list[Turn]:
        messages: list[Message] = [{"role": "user", "content": text(150, ("tools", seed))}]
        more = tools.offer | tools.force
        called = ask(server, APIS[name], messages, True, model="tools", more=more)
        between()
        messages += tools.history
        return [called, ask(server, APIS[name], messages, True, model="tools", more=tools.offer)]

    def converse(attempt: int) -> None:
        stock.unload("tools")
        expected = session(stock, attempt, lambda: None)
        with Server(binary, tmp_path / str(attempt), models, socket=sidecar.socket) as server:
            turns = session(server, attempt, server.restart)
            assert_as_stocks(server, turns, expected)
            (restore,) = server.restores()
        assert turns[0].answer.calls == (("weather",) if tools.force else ())
        assert (turns[0].answer.cached, turns[1].answer.cached) == (0, restore.tokens)
        assert restore.tokens > 200  # the tool, and the question

    until_heard(converse)


@pytest.mark.usefixtures("made")
@pytest.mark.parametrize("tiering", [True, False], ids=["on", "off"])
def test_ollama_run_verbose_says_what_was_found(
    binary: Path, models: Path, tmp_path: Path, sidecar: Sidecar, tiering: bool
) -> None:
    socket = sidecar.socket if tiering else None
    with Server(binary, tmp_path / "tested", models, socket=socket) as server:
        said = []
        for _ in range(2):
            done = subprocess.run(
                [binary, "run", "brief", "--verbose", text(100, "run")],
                env={"HOME": server.environment["HOME"], "OLLAMA_HOST": server.url},
                stdin=subprocess.DEVNULL,
                capture_output=True,
                text=True,
                timeout=60,
                check=True,
            )
            said.append(dict(re.findall(r"(prompt eval \w+|eval count): +(\S+)", done.stderr)))
        loads = server.loads()
    for one, load in zip(said, loads, strict=True):
        assert one["prompt eval count"] == str(load.prompt)
        assert one["eval count"] == "8"
        assert float(one["prompt eval rate"]) > 0
    found = str(loads[1].used) if tiering else None
    assert [one.get("prompt eval cached") for one in said] == [None, found]
