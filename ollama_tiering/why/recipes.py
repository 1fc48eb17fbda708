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
    return next((one for one in recipes if one.fits(verdict, part, around, prompt)), None)


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
    return tuple(_recipe(one, f"{file}: recipe {n}") for n, one in enumerate(recipes, start=1))


def _recipe(one: Any, place: str) -> Recipe:
    if not isinstance(one, dict):
        raise ConfigError(f"{place} is no table", hint="write [[recipe]] before each")
    for key in one:
        if key not in _KEYS:
            raise ConfigError(
                f"{place}: no such key: {plain(key)[:80]}{did_you_mean(key, _KEYS)}",
                hint=f"keys are {', '.join(sorted(_KEYS))}",
            )
    words = {name: _word(one.get(name, ""), name, place) for name in ("client", "cure", "source")}
    for name in ("cure", "source"):
        if not words[name]:
            raise ConfigError(f"{place}: {name} is missing", hint=f'write {name} = "…"')
    return Recipe(
        **words,
        verdicts=_names(one.get("verdicts", []), _VERDICTS, place, "verdicts"),
        parts=_names(one.get("parts", []), _PARTS, place, "parts"),
        text=_pattern(one.get("text"), "text", place),
        prompt=_pattern(one.get("prompt"), "prompt", place),
    )


def _word(value: Any, name: str, place: str) -> str:
    if not isinstance(value, str):
        raise ConfigError(f"{place}: {name} is no text", hint='write it in quotes: "…"')
    return plain(" ".join(value.split()))


def _names(value: Any, known: Sequence[str], place: str, key: str) -> tuple[str, ...]:
    if not isinstance(value, list) or not all(isinstance(one, str) for one in value):
        raise ConfigError(f"{place}: {key} is no list of names", hint=f'{key} = ["{known[0]}"]')
    for one in value:
        if one not in known:
            raise ConfigError(
                f"{place}: {key} has no {plain(one)[:80]}{did_you_mean(one, known)}",
                hint=f"{key} are {', '.join(known)}",
            )
    return tuple(value)


def _pattern(value: Any, key: str, place: str) -> re.Pattern[str] | None:
    if value is None:
        return None
    try:
        return re.compile(value)
    except (re.error, TypeError) as error:
        raise ConfigError(
            f"{place}: {key} is no regular expression: {plain(str(error))}", hint="correct it"
        ) from None
