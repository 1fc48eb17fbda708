from __future__ import annotations

import ast
import inspect
import re
from pathlib import Path

import ollama_tiering
from ollama_tiering import errors

TREE = [
    kind
    for _, kind in inspect.getmembers(errors, inspect.isclass)
    if issubclass(kind, errors.TieringError)
]


def test_each_kind_of_failure_has_its_own_exit_code() -> None:
    codes = [kind.exit_code for kind in TREE if kind.exit_code != 1]
    assert sorted(codes) == list(range(2, 11))


def test_every_exit_code_is_documented() -> None:
    page = Path(__file__).parents[2] / "docs/commands.md"
    documented = {int(code) for code in re.findall(r"^\| (\d+) \|", page.read_text(), re.MULTILINE)}
    assert documented >= {0, 130} | {kind.exit_code for kind in TREE}


def test_message_and_hint_are_apart() -> None:
    error = errors.FetchError("cause", hint="cure")
    assert (str(error), error.hint) == ("cause", "cure")


def test_message_and_hint_are_a_line_each_that_a_terminal_shows() -> None:
    odd = "a\nb\x1b[31m\udcff"
    error = errors.UsageError(f"{odd}: no", hint=f"rm {odd}", told="one\n\ttwo\x07\n")
    shown = r"a\nb\x1b[31m\udcff"
    assert error.message == f"{shown}: no\none\n        two" r"\x07"
    assert error.hint == f"rm {shown}"


# Not met by people who only use the commands; or the message is of a usage that click explains.
WITHOUT_A_CURE = ("bench/", "engines/", "kernels/", "cli/bench", "cli/__init__.py")


def test_every_error_that_people_meet_has_a_cure() -> None:
    """The message has cause and place; the hint says what to do."""
    package = Path(ollama_tiering.__file__).parent
    names = {one.__name__ for one in TREE}
    lacking = [
        f"{file.relative_to(package)}:{node.lineno}"
        for file in sorted(package.rglob("*.py"))
        if not str(file.relative_to(package)).startswith(WITHOUT_A_CURE)
        for node in ast.walk(ast.parse(file.read_text(encoding="utf-8")))
        if isinstance(node, ast.Call)
        and isinstance(node.func, ast.Name)
        and node.func.id in names
        and not any(keyword.arg in ("hint", None) for keyword in node.keywords)
        and node.args
    ]
    assert lacking == []
