"""One turn of a conversation through each API that Ollama serves, with its vendor's own package,
and what the answer says of its prompt.

Every API counts the whole prompt and the tokens of it that were found, and each in its own way:
OpenAI's and Ollama's prompt has the tokens found among it, Anthropic's `input_tokens` has not.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import anthropic
import httpx
import ollama
import openai

from tests.engine.harness import Server, SlotLoad, wait_until
from tests.engine.test_restore import LookupTooSlow

PREDICT = 16
Message = dict[str, Any]


class Answer(NamedTuple):
    text: str
    prompt_tokens: int  # all of the prompt's, as the API defines the sum
    cached: int | None  # how many of them were found; None: not said
    calls: tuple[str, ...] = ()  # names of the tools that the model wants called


class Asked(NamedTuple):
    url: str
    messages: list[Message]
    stream: bool
    model: str = "chat"
    more: dict[str, Any] = {}  # noqa: RUF012 (never written to)


Api = Callable[[Asked], Answer]


class _Copied(httpx.SyncByteStream):
    def __init__(self, stream: Any, copy: bytearray) -> None:
        self.stream, self.copy = stream, copy

    def __iter__(self) -> Iterator[bytes]:
        for part in self.stream:
            self.copy += part
            yield part

    def close(self) -> None:
        self.stream.close()


class _Wire(httpx.HTTPTransport):
    """Keeps what was answered: Ollama's package drops the keys that it does not know."""

    def __init__(self) -> None:
        super().__init__()
        self.answered = bytearray()

    def handle_request(self, request: httpx.Request) -> httpx.Response:
        response = super().handle_request(request)
        response.stream = _Copied(response.stream, self.answered)
        return response

    def last(self) -> dict[str, Any]:
        message: dict[str, Any] = json.loads(self.answered.splitlines()[-1])
        return message


def _options(**more: Any) -> dict[str, Any]:
    return {"temperature": 0, "seed": 1, "num_predict": PREDICT, **more}


def _native(last: dict[str, Any], said: str, calls: tuple[str, ...] = ()) -> Answer:
    return Answer(said, last["prompt_eval_count"], last.get("prompt_eval_cached_count"), calls)


def ollama_chat(asked: Asked) -> Answer:
    wire, more = _Wire(), dict(asked.more)
    client = ollama.Client(host=asked.url, trust_env=False, transport=wire)
    options = _options(**more.pop("options", {}))
    chat: Any = client.chat
    got = chat(asked.model, asked.messages, stream=asked.stream, options=options, **more)
    parts = list(got) if asked.stream else [got]
    client.close()  # type: ignore[no-untyped-call]
    calls = [call.function.name for part in parts for call in part.message.tool_calls or ()]
    assert not asked.stream or len(parts) > 2 or calls, "not streamed"
    return _native(wire.last(), "".join(p.message.content or "" for p in parts), tuple(calls))


def ollama_generate(asked: Asked) -> Answer:
    wire = _Wire()
    client = ollama.Client(host=asked.url, trust_env=False, transport=wire)
    prompt = "".join(message["content"] for message in asked.messages)
    generate: Any = client.generate
    got = generate(asked.model, prompt, stream=asked.stream, options=_options())
    parts = list(got) if asked.stream else [got]
    client.close()  # type: ignore[no-untyped-call]
    assert not asked.stream or len(parts) > 2, "not streamed"
    return _native(wire.last(), "".join(part.response for part in parts))


def _openai(asked: Asked) -> openai.OpenAI:
    return openai.OpenAI(base_url=asked.url + "/v1", api_key="none", max_retries=0)


def _usage(usage: Any) -> tuple[int, int | None]:
    assert usage.total_tokens == usage.prompt_tokens + usage.completion_tokens
    details = usage.prompt_tokens_details
    return usage.prompt_tokens, None if details is None else details.cached_tokens


def openai_chat(asked: Asked) -> Answer:
    settings = {"model": asked.model, "messages": asked.messages, "temperature": 0, "seed": 1}
    settings |= {"max_tokens": PREDICT} | asked.more
    with _openai(asked) as client:
        create: Any = client.chat.completions.create
        if not asked.stream:
            whole = create(**settings)
            message = whole.choices[0].message
            names = tuple(call.function.name for call in message.tool_calls or ())
            return Answer(message.content or "", *_usage(whole.usage), names)
        parts = list(create(**settings, stream=True, stream_options={"include_usage": True}))
    deltas = [part.choices[0].delta for part in parts if part.choices]
    names = tuple(call.function.name for delta in deltas for call in delta.tool_calls or ())
    assert len(deltas) > 2 or names, "not streamed"
    return Answer("".join(d.content or "" for d in deltas), *_usage(parts[-1].usage), names)


def openai_completions(asked: Asked) -> Answer:
    prompt = "".join(message["content"] for message in asked.messages)
    settings = {"model": asked.model, "prompt": prompt, "temperature": 0, "seed": 1}
    settings["max_tokens"] = PREDICT
    with _openai(asked) as client:
        create: Any = client.completions.create
        if not asked.stream:
            whole = create(**settings)
            return Answer(whole.choices[0].text, *_usage(whole.usage))
        parts = list(create(**settings, stream=True, stream_options={"include_usage": True}))
    said = [part.choices[0].text for part in parts if part.choices]
    assert len(said) > 2, "not streamed"
    return Answer("".join(said), *_usage(parts[-1].usage))


def openai_responses(asked: Asked) -> Answer:
    settings = {"model": asked.model, "input": asked.messages, "temperature": 0}
    settings |= {"max_output_tokens": PREDICT} | asked.more
    with _openai(asked) as client:
        create: Any = client.responses.create
        if asked.stream:
            events = list(create(**settings, stream=True))
            deltas = [event.delta for event in events if event.type == "response.output_text.delta"]
            assert len(deltas) > 2, "not streamed"
            said, whole = "".join(deltas), events[-1].response
        else:
            whole = create(**settings)
            said = whole.output_text
    usage = whole.usage
    assert usage.total_tokens == usage.input_tokens + usage.output_tokens
    return Answer(said, usage.input_tokens, usage.input_tokens_details.cached_tokens)


def anthropic_messages(asked: Asked) -> Answer:
    settings = {"model": asked.model, "messages": asked.messages, "max_tokens": PREDICT}
    settings |= {"extra_body": {"temperature": 0}} | asked.more  # the package no longer has it
    if asked.messages[0]["role"] == "system":
        settings |= {"system": asked.messages[0]["content"], "messages": asked.messages[1:]}
    with anthropic.Anthropic(base_url=asked.url, api_key="none", max_retries=0) as client:
        messages: Any = client.messages
        if asked.stream:
            with messages.stream(**settings) as stream:
                assert len(list(stream.text_stream)) > 2, "not streamed"
                whole = stream.get_final_message()
        else:
            whole = messages.create(**settings)
    said, usage = "".join(block.text for block in whole.content), whole.usage
    assert usage.cache_creation_input_tokens is None
    cached = usage.cache_read_input_tokens
    return Answer(said, usage.input_tokens + (cached or 0), cached)


def sse_data(stream: str) -> list[str]:
    """The data of the events of a text/event-stream, without OpenAI's mark of the end."""
    data = [line[6:] for line in stream.split("\n") if line.startswith("data: ")]
    return [one for one in data if one != "[DONE]"]


APIS: dict[str, Api] = {
    "ollama-chat": ollama_chat,
    "ollama-generate": ollama_generate,
    "openai-chat": openai_chat,
    "openai-completions": openai_completions,
    "openai-responses": openai_responses,
    "anthropic-messages": anthropic_messages,
}


class Turn(NamedTuple):
    answer: Answer
    load: SlotLoad


def ask(server: Server, api: Api, messages: list[Message], stream: bool, **more: Any) -> Turn:
    """One turn, and the runner's own line about it, which the answer must agree with."""
    before = len(server.loads())
    answer = api(Asked(server.url, list(messages), stream, **more))
    (load,) = wait_until("the runner's line", lambda: server.loads()[before:])
    assert answer.prompt_tokens == load.prompt, f"{answer} of {load.prompt} tokens"
    return Turn(answer, load)


def assert_as_stocks(server: Server, turns: list[Turn], expected: list[Turn]) -> None:
    """What was found is counted; but for that the same is said, from the same place on."""
    for turn in turns:
        assert turn.answer.cached == turn.load.used, f"{turn.answer} of {turn.load.used} tokens"
    assert {turn.answer.cached for turn in expected} <= {None, 0}, "stock counts nothing"
    places = [[turn.load.used for turn in which] for which in (turns, expected)]
    if places[0] != places[1] and server.pauses():
        raise LookupTooSlow
    assert places[0] == places[1], f"resumed at {places[0]}, stock at {places[1]}"
    for turn, reference in zip(turns, expected, strict=True):
        mine, theirs = turn.answer._replace(cached=None), reference.answer._replace(cached=None)
        assert mine == theirs, f"{mine} instead of {theirs}"
