"""A prompt to be computed ahead of time: a body of Ollama's /api/chat or /api/generate."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final

from ollama_tiering.errors import UsageError

_AS_SENT: Final = "as in a request to /api/chat or /api/generate"
_PLACEHOLDER: Final = "."  # some templates render nothing without a message of the user


@dataclass(frozen=True, slots=True)
class WarmPrompt:
    """What is sent; the model's own template makes a prompt of it, as of any client's request."""

    body: Mapping[str, Any]

    @property
    def model(self) -> str:
        return str(self.body["model"])

    @property
    def path(self) -> str:
        return "/api/generate" if "prompt" in self.body else "/api/chat"

    @property
    def request(self) -> dict[str, Any]:
        """One token is computed: what is wanted is the prompt's rows."""
        options = {**self.body.get("options", {}), "num_predict": 1}
        return {**self.body, "options": options, "stream": False}


def of_parts(
    model: str,
    *,
    system: str = "",
    tools: str = "",
    text: str = "",
    options: Mapping[str, Any] | None = None,
) -> WarmPrompt:
    """The beginning of a chat; `tools` is JSON, as in a request. UsageError if nothing is given."""
    if not (system or tools or text):
        raise UsageError(
            "there is no prompt to compute",
            hint="name a file, --system, --tools or --request",
        )
    messages = [{"role": "system", "content": system}] if system else []
    messages.append({"role": "user", "content": text or _PLACEHOLDER})
    body: dict[str, Any] = {"model": model, "messages": messages}
    if tools:
        body["tools"] = _list(_json(tools, "--tools"), "--tools")
    if options:
        body["options"] = dict(options)
    return checked(body)


def of_request(text: str, model: str, options: Mapping[str, Any] | None = None) -> WarmPrompt:
    """A request's body as a client sends it; `model` and `options`, if given, take the place of its
    own. UsageError.
    """
    body = _json(text, "--request")
    if not isinstance(body, dict):
        raise UsageError("--request: this is no JSON object", hint="give a request's body")
    merged = {**body, **({"model": model} if model else {})}
    if options:
        merged["options"] = {**_object(body.get("options", {}), "options"), **options}
    return checked(merged)


def checked(body: Mapping[str, Any]) -> WarmPrompt:
    """UsageError for what is no body of either call."""
    if not isinstance(body.get("model"), str) or not body["model"]:
        raise UsageError("the request names no model", hint="name one: tiering warm MODEL")
    _object(body.get("options", {}), "options")
    if "prompt" in body:
        if not isinstance(body["prompt"], str) or not body["prompt"]:
            raise UsageError("the request's prompt is no text", hint=_AS_SENT)
        return WarmPrompt(body)
    if not _list(body.get("messages"), "messages"):
        raise UsageError("the request has neither messages nor a prompt", hint=_AS_SENT)
    return WarmPrompt(body)


def options_of(pairs: tuple[str, ...]) -> dict[str, Any]:
    """`num_ctx=8192` and the like. A value that is JSON is taken as such. UsageError."""
    found: dict[str, Any] = {}
    for pair in pairs:
        name, equals, value = pair.partition("=")
        if not name or not equals:
            raise UsageError(f"--option {pair!r} is no NAME=VALUE", hint="-o num_ctx=8192")
        try:
            found[name] = json.loads(value)
        except ValueError:
            found[name] = value
    return found


def _json(text: str, what: str) -> Any:
    try:
        return json.loads(text)
    except ValueError as error:
        raise UsageError(f"{what}: this is no JSON: {error}", hint=_AS_SENT) from None


def _list(value: Any, what: str) -> list[Any]:
    if not isinstance(value, list):
        raise UsageError(f"{what}: a list is wanted", hint=_AS_SENT)
    return value


def _object(value: Any, what: str) -> dict[str, Any]:
    if not isinstance(value, dict):
        raise UsageError(f"{what}: an object is wanted", hint=_AS_SENT)
    return value
