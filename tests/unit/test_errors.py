from __future__ import annotations

import inspect
import re
from pathlib import Path

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
