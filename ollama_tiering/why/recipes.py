"""Known causes of partings, and their cures: `recipes.toml` beside this module, and one of that
name that people keep beside their settings, which is looked at first.
"""

from __future__ import annotations

import re
import tomllib
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from importlib import resources
from pathlib import Path
from typing import Any, Final

from ollama_tiering.errors import ConfigError, did_you_mean, plain
from ollama_tiering.why.turns import Role
from ollama_tiering.why.verdicts import PartingVerdict

FILE_NAME: Final = "recipes.toml"
_KEYS: Final = ("client", "verdicts", "parts", "text", "prompt", "cure", "source")
_SEARCHED: Final = 20_000  # characters
_VERDICTS: Final = tuple(str(one) for one in PartingVerdict)
_PARTS: Final = tuple(str(one) for one in Role if one)


@dataclass(frozen=True, slots=True)
class Recipe:
    """All that is set must hold. `text` is looked for around the place where the prompt parts, on
    both sides, `prompt` in the whole prompt as far as it is known.
    """

    cure: str
    source: str
    client: str = ""
    verdicts: tuple[str, ...] = ()
    parts: tuple[str, ...] = ()
    text: re.Pattern[str] | None = None
    prompt: re.Pattern[str] | None = None

    def fits(self, verdict: PartingVerdict, part: Role, around: str, prompt: str) -> bool:
        return (
            (not self.verdicts or verdict in self.verdicts)
            and (not self.parts or part in self.parts)
            and (self.text is None or self.text.search(around[:_SEARCHED]) is not None)
            and (self.prompt is None or self.prompt.search(prompt[:_SEARCHED]) is not None)
        )


def fitting(
    recipes: Iterable[Recipe], verdict: PartingVerdict, part: Role, around: str, prompt: str
) -> Recipe | None:
    """The first one."""
    return next((recipe for recipe in recipes if recipe.fits(verdict, part, around, prompt)), None)


def all_recipes(own: Path | None) -> tuple[Recipe, ...]:
    """Those of the file `own`, if there is one, then ours. ConfigError for a file that is not
    valid.
    """
    packaged = resources.files(__package__).joinpath(FILE_NAME).read_text("utf-8")
    ours = parsed(packaged, Path(FILE_NAME))
    if own is None:
        return ours
    try:
        text = own.read_text("utf-8")
    except FileNotFoundError:
        return ours
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"{own}: cannot be read: {error}", hint="mend it, or remove it") from None
    return (*parsed(text, own), *ours)


def parsed(text: str, file: Path) -> tuple[Recipe, ...]:
    """ConfigError names the recipe that is wrong."""
    try:
        document = tomllib.loads(text)
    except tomllib.TOMLDecodeError as error:
        raise ConfigError(f"{file}: {plain(str(error))}", hint="correct that line") from None
    recipes = document.pop("recipe", [])
    if document or not isinstance(recipes, list):
        key = next(iter(document), "recipe")
        raise ConfigError(
            f"{file}: {plain(key)[:80]} is no list of recipes", hint="write [[recipe]] before each"
        )
    return tuple(_recipe(entry, f"{file}: recipe {n}") for n, entry in enumerate(recipes, start=1))


def _recipe(entry: Any, where: str) -> Recipe:
    if not isinstance(entry, dict):
        raise ConfigError(f"{where} is no table", hint="write [[recipe]] before each")
    for key in entry:
        if key not in _KEYS:
            raise ConfigError(
                f"{where}: no such key: {plain(key)[:80]}{did_you_mean(key, _KEYS)}",
                hint=f"keys are {', '.join(sorted(_KEYS))}",
            )
    words = {name: _word(entry.get(name, ""), name, where) for name in ("client", "cure", "source")}
    for name in ("cure", "source"):
        if not words[name]:
            raise ConfigError(f"{where}: {name} is missing", hint=f'write {name} = "…"')
    return Recipe(
        **words,
        verdicts=_names(entry.get("verdicts", []), _VERDICTS, where, "verdicts"),
        parts=_names(entry.get("parts", []), _PARTS, where, "parts"),
        text=_pattern(entry.get("text"), "text", where),
        prompt=_pattern(entry.get("prompt"), "prompt", where),
    )


def _word(value: Any, name: str, where: str) -> str:
    if not isinstance(value, str):
        raise ConfigError(f"{where}: {name} is no text", hint='write it in quotes: "…"')
    return plain(" ".join(value.split()))


def _names(value: Any, known: Sequence[str], where: str, key: str) -> tuple[str, ...]:
    if not isinstance(value, list) or not all(isinstance(name, str) for name in value):
        raise ConfigError(f"{where}: {key} is no list of names", hint=f'{key} = ["{known[0]}"]')
    for name in value:
        if name not in known:
            raise ConfigError(
                f"{where}: {key} has no {plain(name)[:80]}{did_you_mean(name, known)}",
                hint=f"{key} are {', '.join(known)}",
            )
    return tuple(value)


def _pattern(value: Any, key: str, where: str) -> re.Pattern[str] | None:
    if value is None:
        return None
    try:
        return re.compile(value)
    except (re.error, TypeError) as error:
        raise ConfigError(
            f"{where}: {key} is no regular expression: {plain(str(error))}", hint="correct it"
        ) from None
