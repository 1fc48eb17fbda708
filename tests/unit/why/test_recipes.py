"""Cures: ours are whole, people's come first, and a mistake in theirs is named with its place."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from ollama_tiering.errors import ConfigError
from ollama_tiering.why.recipes import all_recipes, fitting, parsed
from ollama_tiering.why.turns import Role
from ollama_tiering.why.verdicts import PartingVerdict

CURED = set(PartingVerdict) - {
    *(PartingVerdict.OTHER_PROMPT, PartingVerdict.CHANGED, PartingVerdict.NO_TEXT),
}


def test_every_verdict_that_is_a_fault_of_something_has_a_cure() -> None:
    ours = all_recipes(None)
    for verdict in CURED:
        role = Role.ASSISTANT if verdict is PartingVerdict.REWRITTEN else Role.SYSTEM
        assert fitting(ours, verdict, role, "", "") is not None, verdict
    for verdict in set(PartingVerdict) - CURED:
        assert fitting(ours, verdict, Role.SYSTEM, "", "") is None, verdict


def test_every_cure_says_what_to_do_and_who_says_so() -> None:
    root = Path(__file__).parents[3]
    for recipe in all_recipes(None):
        assert recipe.cure.endswith(".")
        address = re.match(r"https://github\.com/[\w.-]+/[\w.-]+/(issues|pull)/\d+$", recipe.source)
        page = (root / recipe.source).is_file()
        assert address or page or "commit" in recipe.source, recipe.source


def test_people_own_come_first_and_nothing_is_wrong_without_them(tmp_path: Path) -> None:
    own = tmp_path / "recipes.toml"
    assert all_recipes(own) == all_recipes(None)
    own.write_text('[[recipe]]\nverdicts = ["order"]\ncure = "Sort."\nsource = "me"\n')
    found = fitting(all_recipes(own), PartingVerdict.ORDER, Role.TOOLS, "", "")
    assert found is not None
    assert found.cure == "Sort."


@pytest.mark.parametrize(
    ("text", "said", "hint"),
    [
        ("[[recipe]]\ncure = 1\n", "recipe 1: cure is no text", "quotes"),
        ('[[recipe]]\nsource = "s"\n', "recipe 1: cure is missing", "write cure"),
        ('[[recipe]]\ncure = "c"\n', "recipe 1: source is missing", "write source"),
        ('[[recipe]]\ncuer = "c"\n', "no such key: cuer", "keys are client"),
        (
            '[[recipe]]\ncure = "c"\nsource = "s"\ntext = "("\n',
            "text is no regular expr",
            "correct",
        ),
        ('[[recipe]]\ncure = "c"\nsource = "s"\ntext = 1\n', "text is no regular expr", "correct"),
        ('[[recipe]]\ncure = "c"\nsource = "s"\nparts = ["sistem"]\n', "no sistem", "parts are"),
        ('[[recipe]]\ncure = "c"\nsource = "s"\nverdicts = "value"\n', "no list", "verdicts = ["),
        ('recipe = ["x"]\n', "recipe 1 is no table", "[[recipe]]"),
        ('[recipe]\ncure = "c"\n', "recipe is no list of recipes", "[[recipe]]"),
        ("[[recipes]]\n", "recipes is no list of recipes", "[[recipe]]"),
        ("[[recipe\n", "recipes.toml: ", "correct that line"),
    ],
)
def test_a_mistake_is_named_with_its_place(text: str, said: str, hint: str) -> None:
    with pytest.raises(ConfigError) as caught:
        parsed(text, Path("recipes.toml"))
    assert said in caught.value.message
    assert caught.value.message.startswith("recipes.toml: ")
    assert hint in (caught.value.hint or "")


def test_what_is_no_text_is_said_with_its_path(tmp_path: Path) -> None:
    own = tmp_path / "recipes.toml"
    for make in (lambda: own.mkdir(), lambda: (own.rmdir(), own.write_bytes(b"\xff\xfe"))):
        make()
        with pytest.raises(ConfigError, match=re.escape(str(own))):
            all_recipes(own)


def test_a_cure_cannot_command_a_terminal() -> None:
    (one,) = parsed('[[recipe]]\ncure = "a\\u001b[31m"\nsource = "s"\n', Path("r"))
    assert "\x1b" not in one.cure
