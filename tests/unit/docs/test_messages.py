"""Commands that the program itself names, in help, errors and hints, are ones that there are."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator

import click

from tests.unit.docs.invocation import check
from tests.unit.docs.pages import ROOT
from tests.unit.docs.shell import commands

_QUOTED = re.compile(r"`(tiering [^`]+)`")
# The whole of a text, as a hint often is, or what follows a colon in it.
_BARE = re.compile(r"(?:^|: )(tiering [a-z][\w -]*?)(?= \(|[;,)]|$)")


def texts() -> Iterator[tuple[str, str]]:
    """Where, and each text of the code; what is put into it when it runs is `VALUE`."""
    for file in sorted((ROOT / "ollama_tiering").rglob("*.py")):
        tree = ast.parse(file.read_text(encoding="utf-8"))
        parts = {
            part
            for node in ast.walk(tree)
            if isinstance(node, ast.JoinedStr)
            for part in node.values
        }
        for node in ast.walk(tree):
            where = f"{file.relative_to(ROOT)}:{getattr(node, 'lineno', 0)}"
            if isinstance(node, ast.JoinedStr):
                yield (
                    where,
                    "".join(
                        str(part.value) if isinstance(part, ast.Constant) else "VALUE"
                        for part in node.values
                    ),
                )
            elif (
                isinstance(node, ast.Constant) and isinstance(node.value, str) and node not in parts
            ):
                yield where, node.value


def named() -> Iterator[tuple[str, str]]:
    for where, text in texts():
        flat = " ".join(text.split())
        flat = re.sub(r"(?<=[a-z])VALUE", " …", flat)  # `tiering status{options}`
        for found in (*_QUOTED.findall(flat), *_BARE.findall(flat)):
            yield where, found


def test_every_command_that_a_message_names_is_one_that_click_takes() -> None:
    found = list(named())
    wrong = []
    for where, text in found:
        for words in commands(text):
            try:
                check(words[1:], mention=True)
            except click.UsageError as error:
                wrong.append(f"{where}: {text}: {error.format_message()}")
    assert not wrong, "\n".join(wrong)
    assert {"tiering up", "tiering config", "tiering gc"} <= {text for _, text in found}
    assert len(found) > 40
