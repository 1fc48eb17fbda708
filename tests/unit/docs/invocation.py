"""Whether Click would take a command line, without running any of it.

Placeholders stand for something of the right type: words in capitals (`ID`, `FILE.md`), a
variable, a substitution. `…` means that more may follow.
"""

from __future__ import annotations

import re
from typing import Any

import click

from ollama_tiering.cli import cli
from ollama_tiering.config import SETTINGS
from ollama_tiering.models.shapes import SHAPES
from ollama_tiering.patchset import manifest

PROGRAMS = {"tiering", "scripts/tiering", "./scripts/tiering"}
_PLACEHOLDER = re.compile(r"\[?[A-Z][A-Z_]*(\.\w+)?\]?(\.\.\.)?|\$\w+|.*SUBSTITUTED.*|/path/to/.*")
_OPEN = "…"
_GIVEN = (str, bool, list, tuple)  # what was not given is a mark of Click's own


def is_placeholder(word: Any) -> bool:
    return isinstance(word, str) and _PLACEHOLDER.fullmatch(word) is not None


def check(words: list[str], *, mention: bool = False) -> None:
    """UsageError as Click would say it. `mention`: the name of a command in a sentence, which may
    leave out what the command needs.
    """
    open_end = _OPEN in words
    words = words[: words.index(_OPEN)] if open_end else words
    command: click.Command = cli
    context = click.Context(cli, info_name="tiering", **cli.context_settings)
    while True:
        values, rest = _parsed(command, context, words, mention)
        _convert(command, context, values)
        helps = {*context.help_option_names} & set(words)
        if not isinstance(command, click.Group):
            if not (helps or open_end or (mention and not words)):
                _require(command, context, values)
            return
        if not rest:
            may_stop = command.invoke_without_command or mention or helps or open_end
            if not may_stop and "--version" not in words:
                raise click.UsageError("a subcommand is missing", context)
            return
        if is_placeholder(rest[0]):
            return  # any command
        name, found, words = command.resolve_command(context, rest)
        assert found is not None
        context = click.Context(found, info_name=name, parent=context, **found.context_settings)
        command = found


def _parsed(
    command: click.Command, context: click.Context, words: list[str], mention: bool
) -> tuple[dict[str, Any], list[str]]:
    """Raw values that were given, by the parameter's name, and what is left for a subcommand."""
    try:
        values, rest, _ = command.make_parser(context).parse_args(args=list(words))
    except click.BadOptionUsage as error:
        if isinstance(error, click.NoSuchOption) or not mention:
            raise
        return _parsed(command, context, [*words, "VALUE"], mention=False)
    if rest and not isinstance(command, click.Group):
        raise click.UsageError(f"unexpected extra arguments: {' '.join(rest)}", context)
    given = {name: value for name, value in values.items() if isinstance(value, _GIVEN)}
    return given, rest


def _convert(command: click.Command, context: click.Context, values: dict[str, Any]) -> None:
    for param in command.get_params(context):
        value = values.get(param.name or "")
        for word in value if isinstance(value, list | tuple) else [value]:
            if not isinstance(word, str) or is_placeholder(word):
                continue
            if not isinstance(param.type, click.Path):  # which may have to exist
                param.type.convert(word, param, context)
            if unknown := _unknown(command, param, word):
                raise click.BadParameter(f"there is no {unknown!r}", context, param)


def _unknown(command: click.Command, param: click.Parameter, word: str) -> str | None:
    """A name that the command looks up only when it runs."""
    if param.name == "only" and isinstance(param.default, str):  # parts, all of them by default
        known = set(param.default.split(","))
        return next((part for part in word.split(",") if part not in known), None)
    if param.name == "keys" and command.name == "config":
        keys = {setting.key for setting in SETTINGS}
        return None if word in keys | {key.partition(".")[0] for key in keys} else word
    if param.name == "shape":
        return None if word in SHAPES else word
    if param.name in ("tag", "tags"):
        return None if word in manifest.load().pins else word
    return None


def _require(command: click.Command, context: click.Context, values: dict[str, Any]) -> None:
    for param in command.get_params(context):
        if param.required and not values.get(param.name or ""):
            raise click.MissingParameter(ctx=context, param=param)
